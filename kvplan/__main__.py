from kvplan.cli.app import entry

entry()
