"""Skip ahead: the state of the CPU's generator after a count of numbers, without drawing them.

The generator is mt19937: each of its words is a sum, in bits, of earlier ones. A step of one word is a linear
map F of its state, so n steps are F^n, and F^n is r(F) for the remainder r of x^n by the characteristic
polynomial of F. r has a degree below 19,937: what is needed is a sum of that many states at most, which
follow each other from the state that there is (Haramoto, Matsumoto, Nishimura, Panneton and L'Ecuyer, 2008).
"""

from functools import cache, lru_cache

import numpy as np
import torch
from numpy.typing import NDArray

Words = NDArray[np.uint32]

_WORDS, _MIDDLE, _DEGREE = 624, 397, 19937
_TWIST = 0x9908B0DF
_LEFT, _NEXT, _STATE = slice(8, 12), slice(16, 24), slice(24, 24 + 8 * _WORDS)  # bytes of PyTorch's state
_TOGETHER = 64  # states that are added up at once


def skip_ahead(words: int) -> None:
    """Leave PyTorch's generator as it is after this number of words, of 32 bits each, was drawn."""
    if not words:
        return
    state = torch.get_rng_state().numpy()
    used = _WORDS + 1 - int(state[_LEFT].view(np.int32)[0])  # of the words in the state
    blocks, place = divmod(used + words - 1, _WORDS)
    if blocks:
        now = state[_STATE].view(np.uint64).astype(np.uint32)
        state[_STATE].view(np.uint64)[:] = _moved(now, blocks * _WORDS)
    state[_NEXT].view(np.uint64)[0] = place + 1
    state[_LEFT].view(np.int32)[0] = _WORDS - place
    torch.set_rng_state(torch.from_numpy(state))


def _moved(state: Words, words: int) -> Words:
    """The state after this number of words."""
    following = _following(state, _DEGREE + _WORDS + 1)[1:]  # of the first word all but a bit is unused
    remainder = _power(words - 1).to_bytes(_DEGREE // 8 + 1, "little")
    (added,) = np.unpackbits(np.frombuffer(remainder, np.uint8), bitorder="little").nonzero()
    states = np.lib.stride_tricks.sliding_window_view(following, _WORDS)
    total = np.zeros(_WORDS, np.uint32)
    for first in range(0, len(added), _TOGETHER):
        total ^= np.bitwise_xor.reduce(states[added[first : first + _TOGETHER]], axis=0)
    return total


def _following(state: Words, count: int) -> Words:
    """The words of a state and those after it."""
    words = np.empty(count + _WORDS, np.uint32)
    words[:_WORDS] = state
    run = _WORDS - _MIDDLE  # of words that do not depend on each other
    for at in range(0, count, run):
        first, second, far = (words[at + shift :][:run] for shift in (0, 1, _MIDDLE))
        joined = (first & 0x80000000) | (second & 0x7FFFFFFF)
        made = far ^ (joined >> 1) ^ (second & 1) * np.uint32(_TWIST)
        room = words[at + _WORDS :][:run]
        room[:] = made[: len(room)]
    return words[:count]


@lru_cache(64)
def _power(exponent: int) -> int:
    """The remainder of x^exponent. Polynomials are integers whose bits are the coefficients."""
    found = 1
    for bit in format(exponent, "b"):
        found = _remainder(_square(found) << int(bit))
    return found


def _square(polynomial: int) -> int:
    """Coefficients move apart: mixed terms come twice, and twice is nothing."""
    given = polynomial.to_bytes(polynomial.bit_length() // 8 + 1, "little")
    return int.from_bytes(_APART[np.frombuffer(given, np.uint8)].tobytes(), "little")


_APART = np.array([int(format(byte, "b"), 4) for byte in range(256)], "<u2")  # bits of a byte with gaps


def _remainder(polynomial: int) -> int:
    while high := polynomial >> _DEGREE:
        polynomial ^= high << _DEGREE
        for term in _terms():
            polynomial ^= high << term
    return polynomial


@cache
def _terms() -> tuple[int, ...]:
    """Exponents in the characteristic polynomial, but for the highest (Matsumoto and Nishimura, 1998)."""
    found = 1
    for bit in range(32):
        shift = 0 if bit == 31 else 1
        found = (found << (_WORDS - shift)) ^ (found << (_MIDDLE - shift)) ^ (_TWIST >> bit & 1)
    return tuple(term for term in range(_DEGREE) if found >> term & 1)
