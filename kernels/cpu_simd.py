"""Inner loops of the CPU backend, written as LLVM vectors so that they vectorise on every machine.

numba's plain loops reach a fraction of memory speed here: it keeps reductions over ``head_dim`` scalar unless
fastmath is on, reloads what may alias, and calls a scalar ``exp``. These intrinsics spell the vectors out
(8 lanes of float32; LLVM maps them to AVX2, AVX-512 or NEON) and nothing else: no bounds, no allocation.

Addresses are plain integers, since a token's row is found through the block table. ``kind`` names how a
stored number becomes a float32 (see `KINDS`); ``groups x tokens`` is the register tile, 8 accumulators.
"""

from __future__ import annotations

import zlib
from pathlib import Path

from llvmlite import ir  # type: ignore[import-untyped]
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

LANES = 8
# numba's disk cache watches only the file of the compiled function, so that function names this stamp.
SOURCE_STAMP = zlib.crc32(Path(__file__).read_bytes())
# name of the stored type -> (kind, bytes a number)
KINDS = {
    "float32": (0, 4),
    "bfloat16": (1, 2),
    "float16": (2, 2),
    "float8_e4m3fn": (3, 1),
    "float8_e5m2": (4, 1),
}
# e4m3 bits moved into a half are the number divided by this: half's exponent bias is 15, e4m3's is 7.
E4M3_FACTOR = 256.0

_F32 = ir.FloatType()
_I8, _I16, _I32, _I64 = (ir.IntType(bits) for bits in (8, 16, 32, 64))
_VF = ir.VectorType(_F32, LANES)
_VI32 = ir.VectorType(_I32, LANES)
_VI16 = ir.VectorType(_I16, LANES)
_VI8 = ir.VectorType(_I8, LANES)
_VHALF = ir.VectorType(ir.HalfType(), LANES)
_BYTES = dict(KINDS.values())


def _int_vector(vector_type, value):
    return ir.Constant(vector_type, [value] * LANES)


def _float_vector(value):
    return ir.Constant(_VF, [value] * LANES)


def _pointer(builder, address, offset=0):
    if offset:
        address = builder.add(address, ir.Constant(_I64, offset))
    return builder.inttoptr(address, _I8.as_pointer())


def _load(builder, address, vector_type, align, offset=0):
    pointer = builder.bitcast(_pointer(builder, address, offset), vector_type.as_pointer())
    return builder.load(pointer, align=align)


def _store(builder, value, address, offset=0):
    pointer = builder.bitcast(_pointer(builder, address, offset), value.type.as_pointer())
    builder.store(value, pointer, align=4)


def _load_floats(builder, kind, address):
    """8 stored numbers as float32 lanes (e4m3: divided by E4M3_FACTOR)."""
    if kind == 0:
        return _load(builder, address, _VF, 4)
    if kind == 1:
        wide = builder.zext(_load(builder, address, _VI16, 2), _VI32)
        return builder.bitcast(builder.shl(wide, _int_vector(_VI32, 16)), _VF)
    if kind == 2:
        half = _load(builder, address, _VI16, 2)
    else:
        bits = builder.zext(_load(builder, address, _VI8, 1), _VI16)
        if kind == 4:  # e5m2 is a half without its low byte
            half = builder.shl(bits, _int_vector(_VI16, 8))
        else:
            sign = builder.shl(builder.and_(bits, _int_vector(_VI16, 0x80)), _int_vector(_VI16, 8))
            rest = builder.shl(builder.and_(bits, _int_vector(_VI16, 0x7F)), _int_vector(_VI16, 7))
            half = builder.or_(sign, rest)
    return builder.fpext(builder.bitcast(half, _VHALF), _VF)


def _call(builder, name, result, args):
    function_type = ir.FunctionType(result, [arg.type for arg in args])
    return builder.call(cgutils.get_or_insert_function(builder.module, function_type, name), args)


def _fma(builder, a, b, c):
    return _call(builder, "llvm.fma.v8f32", _VF, [a, b, c])


def _prefetch(builder, address):
    flags = [ir.Constant(_I32, value) for value in (0, 3, 1)]  # read, keep in all caches, data
    _call(builder, "llvm.prefetch.p0", ir.VoidType(), [_pointer(builder, address), *flags])


def _splat(builder, scalar):
    one = builder.insert_element(ir.Constant(_VF, ir.Undefined), scalar, ir.Constant(_I32, 0))
    return builder.shuffle_vector(one, ir.Constant(_VF, ir.Undefined), _int_vector(_VI32, 0))


def _lanes(indices):
    return ir.Constant(ir.VectorType(_I32, len(indices)), list(indices))


def _sum_each(builder, vectors):
    """Eight vectors -> one vector of their eight sums: three rounds of pairwise adds."""
    while len(vectors) > 1:
        # A vector holds the partial sums of 8/len(vectors) inputs, each in a run of `run` lanes.
        run = len(vectors)
        low, high = [], []
        for start in range(0, 2 * LANES, run):
            low += range(start, start + run // 2)
            high += range(start + run // 2, start + run)
        paired = []
        for a, b in zip(vectors[::2], vectors[1::2], strict=True):
            left = builder.shuffle_vector(a, b, _lanes(low))
            right = builder.shuffle_vector(a, b, _lanes(high))
            paired.append(builder.fadd(left, right))
        vectors = paired
    return vectors[0]


def _loop(builder, count, carried, body):
    """for i in range(count): carried = body(i, carried), with the carried values in registers."""
    before, loop, after = (
        builder.block,
        builder.append_basic_block("loop"),
        builder.append_basic_block("after"),
    )
    builder.branch(loop)
    builder.position_at_end(loop)
    index = builder.phi(_I64)
    index.add_incoming(ir.Constant(_I64, 0), before)
    phis = []
    for value in carried:
        phi = builder.phi(value.type)
        phi.add_incoming(value, before)
        phis.append(phi)
    results = body(index, phis)
    following = builder.add(index, ir.Constant(_I64, 1))
    end = builder.block
    index.add_incoming(following, end)
    for phi, value in zip(phis, results, strict=True):
        phi.add_incoming(value, end)
    builder.cbranch(builder.icmp_signed("<", following, count), loop, after)
    builder.position_at_end(after)
    return results


def _scaled(builder, index, factor):
    return builder.mul(index, ir.Constant(_I64, factor))


def _row_addresses(builder, rows, offset, tokens, first=0):
    addresses = []
    for token in range(tokens):
        row = _load(builder, rows, _I64, 8, 8 * (first + token))
        addresses.append(builder.add(row, offset))
    return addresses


@intrinsic(prefer_literal=True)
def dot_rows(typingctx, kind, groups, tokens, ahead, q, rows, offset, scores, stride, chunks):
    """``scores[g * stride + t] = sum_i q[g, i] * row_t[i]`` for a tile of groups x tokens = 8.

    ``q``: address of float32 ``[groups, 8 * chunks]``; ``rows``: address of int64 row addresses;
    ``offset``: bytes from a row's start to this KV head; ``ahead > 0``: also fetch rows ``ahead`` places on.
    """
    kind_, groups_, tokens_ = kind.literal_value, groups.literal_value, tokens.literal_value
    ahead_ = ahead.literal_value
    assert groups_ * tokens_ == LANES

    def codegen(context, builder, signature, args):
        q_, rows_, offset_, scores_, stride_, chunks_ = args[4:]
        addresses = _row_addresses(builder, rows_, offset_, tokens_)
        fetched = _row_addresses(builder, rows_, offset_, tokens_, ahead_) if ahead_ else []
        q_step = _scaled(builder, chunks_, LANES * 4)
        q_rows = [builder.add(q_, _scaled(builder, q_step, g)) for g in range(groups_)]
        step = LANES * _BYTES[kind_]

        def body(index, sums):
            moved = _scaled(builder, index, step)
            for address in fetched:
                _prefetch(builder, builder.add(address, moved))
            values = [_load_floats(builder, kind_, builder.add(address, moved)) for address in addresses]
            at = _scaled(builder, index, LANES * 4)
            result = []
            for g in range(groups_):
                query = _load(builder, builder.add(q_rows[g], at), _VF, 4)
                for t in range(tokens_):
                    result.append(_fma(builder, query, values[t], sums[g * tokens_ + t]))
            return result

        sums = _loop(builder, chunks_, [_float_vector(0.0)] * LANES, body)
        total = _sum_each(builder, list(sums))
        for g in range(groups_):
            part = builder.shuffle_vector(total, total, _lanes(range(g * tokens_, (g + 1) * tokens_)))
            _store(builder, part, builder.add(scores_, _scaled(builder, stride_, 4 * g)))
        return context.get_dummy_value()

    return types.void(kind, groups, tokens, ahead, *[types.int64] * 6), codegen


@intrinsic(prefer_literal=True)
def add_rows(typingctx, kind, groups, tokens, ahead, acc, rows, offset, weights, stride, chunks):
    """``acc[g, i] += sum_t weights[g * stride + t] * row_t[i]``; arguments as in `dot_rows`."""
    kind_, groups_, tokens_ = kind.literal_value, groups.literal_value, tokens.literal_value
    ahead_ = ahead.literal_value

    def codegen(context, builder, signature, args):
        acc_, rows_, offset_, weights_, stride_, chunks_ = args[4:]
        addresses = _row_addresses(builder, rows_, offset_, tokens_)
        fetched = _row_addresses(builder, rows_, offset_, tokens_, ahead_) if ahead_ else []
        acc_step = _scaled(builder, chunks_, LANES * 4)
        acc_rows = [builder.add(acc_, _scaled(builder, acc_step, g)) for g in range(groups_)]
        factors = []
        for g in range(groups_):
            base = builder.add(weights_, _scaled(builder, stride_, 4 * g))
            for t in range(tokens_):
                factors.append(_splat(builder, _load(builder, base, _F32, 4, 4 * t)))
        step = LANES * _BYTES[kind_]

        def body(index, _):
            moved = _scaled(builder, index, step)
            for address in fetched:
                _prefetch(builder, builder.add(address, moved))
            values = [_load_floats(builder, kind_, builder.add(address, moved)) for address in addresses]
            at = _scaled(builder, index, LANES * 4)
            for g in range(groups_):
                place = builder.add(acc_rows[g], at)
                total = _load(builder, place, _VF, 4)
                for t in range(tokens_):
                    total = _fma(builder, factors[g * tokens_ + t], values[t], total)
                _store(builder, total, place)
            return []

        _loop(builder, chunks_, [], body)
        return context.get_dummy_value()

    return types.void(kind, groups, tokens, ahead, *[types.int64] * 6), codegen


def _exp2(builder, x):
    """2**x for x <= 0, to 2e-7 relative: split off the whole part, polynomial on [-0.5, 0.5]."""
    # minnum/maxnum order: a NaN score must stay NaN, so only the lower side is clamped, by compare.
    low = _float_vector(-126.0)
    x = builder.select(builder.fcmp_ordered("<", x, low), low, x)
    whole = _call(builder, "llvm.rint.v8f32", _VF, [x])
    rest = builder.fsub(x, whole)
    # ln(2)^k / k!, k = 6 .. 0
    terms = [1.5403530e-4, 1.3333558e-3, 9.6181291e-3, 5.5504109e-2, 0.24022651, 0.69314718, 1.0]
    value = _float_vector(terms[0])
    for term in terms[1:]:
        value = _fma(builder, value, rest, _float_vector(term))
    exponent = builder.add(builder.fptosi(whole, _VI32), _int_vector(_VI32, 127))
    power = builder.bitcast(builder.shl(exponent, _int_vector(_VI32, 23)), _VF)
    return builder.fmul(value, power)


@intrinsic(prefer_literal=True)
def exp2_below(typingctx, values, limit, chunks):
    """Overwrite float32 ``values[8 * chunks]`` with ``2 ** (value - limit)`` and return their sum.

    Values 126 or more below the limit become 2^-126, which adds nothing to a sum that holds a 1.
    """

    def codegen(context, builder, signature, args):
        values_, limit_, chunks_ = args
        limits = _splat(builder, limit_)

        def body(index, sums):
            place = builder.add(values_, _scaled(builder, index, LANES * 4))
            weight = _exp2(builder, builder.fsub(_load(builder, place, _VF, 4), limits))
            _store(builder, weight, place)
            return [builder.fadd(sums[0], weight)]

        (total,) = _loop(builder, chunks_, [_float_vector(0.0)], body)
        result = ir.Constant(_F32, 0.0)
        for lane in range(LANES):
            result = builder.fadd(result, builder.extract_element(total, ir.Constant(_I32, lane)))
        return result

    return types.float32(types.int64, types.float32, types.int64), codegen
