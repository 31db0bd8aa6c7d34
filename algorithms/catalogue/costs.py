"""The costs of the algorithms of the registry, in closed form; they have the names of their builders.

p is the number of ranks and L = ⌈log_k p⌉, with k the radix. The vector that costs are multiples of is the INPUT of a
rank in a reduction and in an alltoall, what a broadcast carries, what the root of a gather or scatter has of all ranks,
the OUTPUT of an allgather, and the token of a barrier. A rooted algorithm has the cost of its most expensive root. A
cost takes those parameters of its builder that it depends on.
"""

from __future__ import annotations

from dataclasses import replace

from unisono.algorithms.builders.folding import fold
from unisono.algorithms.builders.lane_pieces import distances
from unisono.algorithms.catalogue.algorithm import Cost


def _rounds(size: int, radix: int = 2) -> int:
    """Return ⌈log_radix size⌉."""
    return len(list(distances(size, radix)))


def _others(size: int) -> float:
    """Return what all ranks but one have of the vector."""
    return (size - 1) / size


def _windows(size: int, window: int) -> int:
    """Return how many windows it takes to exchange with all other ranks."""
    return -(-(size - 1) // window)


def _most_messages(size: int, radix: int) -> int:
    """Return how many messages the top of a k-nomial tree sends: k - 1 in each round, and in the last what is left."""
    rounds = _rounds(size, radix)
    return (radix - 1) * (rounds - 1) - (-size // radix ** (rounds - 1)) - 1 if rounds else 0


def _folded(size: int) -> tuple[int, int]:
    """Return ⌊log2 p⌋, and 1 if p is more than that power of two, so that some ranks are folded, else 0."""
    rounds = size.bit_length() - 1
    return rounds, int(size > 1 << rounds)


# --- reducing data -------------------------------------------------------------------------------------------------


def allreduce_direct(size: int, window: int = 32) -> Cost:
    """Everybody sends to all others."""
    return Cost(rounds=_windows(size, window), sent=size - 1, reduced=size - 1)


def allreduce_ring(size: int) -> Cost:
    """The reduce-scatter, then the allgather."""
    return Cost(rounds=2 * (size - 1), sent=2 * (size - 1) / size, reduced=_others(size))


def allreduce_rings(size: int, lanes: int = 2) -> Cost:
    """Rings side by side share the vector out, and take the same time each."""
    return replace(allreduce_ring(size), most_messages=2 * (size - 1) * lanes)


def allreduce_recursive_doubling(size: int) -> Cost:
    """The busiest rank of a folded pair combines once more and sends once more; it waits for both, two more rounds."""
    rounds, fold = _folded(size)
    return Cost(rounds=rounds + 2 * fold, sent=rounds + fold, reduced=rounds + fold)


def allreduce_recursive_multiplying(size: int, radix: int = 4) -> Cost:
    """Each round exchanges with k - 1 others; the longest run of folded ranks has ⌈p / k^rounds⌉."""
    folding = fold(size, max(2, min(radix, size)))
    exchanged = folding.rounds * (folding.radix - 1)
    aside = -(-size // folding.positions) - 1
    return Cost(rounds=folding.rounds + 2 * (aside > 0), sent=exchanged + aside, reduced=exchanged + aside)


def allreduce_rabenseifner(size: int) -> Cost:
    """Halving, then doubling; a rank that others are folded with takes one vector more each way."""
    rounds, fold = _folded(size)
    moved = _others(1 << rounds)
    return Cost(rounds=2 * (rounds + fold), sent=2 * moved + fold, reduced=moved + fold)


def allreduce_circulant(size: int) -> Cost:
    """The reduce-scatter, then the allgather."""
    return Cost(rounds=2 * _rounds(size), sent=2 * (size - 1) / size, reduced=_others(size))


def allreduce_reduce_broadcast(size: int) -> Cost:
    """A rank inside the tree sends one vector up and two down; four ranks have one that is not the top."""
    return Cost(rounds=2 * (size.bit_length() - 1), sent=min(3, size - 1), reduced=min(2, size - 1))


def allreduce_chain(size: int) -> Cost:
    """To the first rank and back."""
    return Cost(rounds=2 * (size - 1), sent=min(2, size - 1), reduced=min(1, size - 1))


def allreduce_double_binary_tree(size: int) -> Cost:
    """Half of the vector three times inside one tree, and once as a leaf of the other."""
    return Cost(
        rounds=2 * (size.bit_length() - 1), sent=min(4, size) / 2 if size > 1 else 0, reduced=min(2, size - 1) / 2
    )


def allreduce_two_exchanges(size: int, window: int = 32) -> Cost:
    """Two direct exchanges of all but the own block."""
    rounds, messages = 2 * _windows(size, window), 2 * (size - 1)
    return Cost(rounds, sent=messages / size, reduced=_others(size), most_messages=messages)


def allreduce_one_shot(size: int, window: int = 32) -> Cost:
    """All ranks meet twice; what is read of others counts as sent."""
    return Cost(rounds=2 * _windows(size, window), sent=size - 1, reduced=size - 1)


def allreduce_two_shot(size: int, window: int = 32) -> Cost:
    """All ranks meet three times."""
    return Cost(rounds=3 * _windows(size, window), sent=2 * (size - 1) / size, reduced=_others(size))


def reduce_read(size: int) -> Cost:
    """A flag to the root before and one of it after; the root reads what all others have."""
    return Cost(rounds=2 * min(1, size - 1), sent=size - 1, reduced=size - 1)


def reduce_binomial(size: int) -> Cost:
    """Rank 0 as the root receives in every round."""
    return Cost(rounds=_rounds(size), sent=min(1, size - 1), reduced=_rounds(size))


def reduce_knomial(size: int, radix: int = 4) -> Cost:
    """Rank 0 as the root receives in every round from k - 1 others, and in the last from those that are left."""
    return Cost(rounds=_rounds(size, radix), sent=min(1, size - 1), reduced=_most_messages(size, radix))


def reduce_all_pairs(size: int, window: int = 32) -> Cost:
    """All but the root send the others their blocks, and the root the result of their own."""
    return Cost(rounds=2 * _windows(size, window), sent=min(1, size - 1), reduced=_others(size))


def reduce_chain(size: int) -> Cost:
    """A rank inside the chain receives once and sends once."""
    return Cost(rounds=size - 1, sent=min(1, size - 1), reduced=min(1, size - 1))


def reduce_binary(size: int) -> Cost:
    """Rank 0 as the root has all others in one tree, of depth ⌊log2(p - 1)⌋, below it."""
    return Cost(rounds=_rounds(size), sent=min(1, size - 1), reduced=min(2, size - 1))


def reduce_rabenseifner(size: int) -> Cost:
    """A rank next to the root's side hands half of the vector over in the last round of the gather."""
    rounds, fold = _folded(size)
    moved = _others(1 << rounds)
    return Cost(rounds=2 * rounds + fold, sent=moved + 0.5 * (size > 1), reduced=moved + fold)


def reduce_double_binary_tree(size: int) -> Cost:
    """The trees have a depth of ⌊log2(p - 1)⌋, and the root is above them."""
    return Cost(rounds=_rounds(size), sent=min(1, size - 1), reduced=min(1, size - 1))


def reduce_scatter_recursive_halving(size: int) -> Cost:
    """The first ranks are folded in pairs; the first pair keeps as much as any in every round.

    A rank that stands aside sends the vector, and what the others send adds up to the vector but for their own block.
    """
    rounds, fold = _folded(size)
    pairs = size - (1 << rounds)
    kept = sum((1 << bit) + min(1 << bit, pairs) for bit in range(rounds))
    combined = (fold * size + kept) / size
    return Cost(rounds=rounds + 2 * fold, sent=1 if fold else _others(size), reduced=combined, stored=combined)


def reduce_scatter_ring(size: int) -> Cost:
    """What comes from one neighbour is stored, but for the last, and goes on to the other one."""
    stored = max(0, size - 2) / size
    return Cost(rounds=size - 1, sent=_others(size), reduced=_others(size), stored=stored)


def reduce_scatter_pairwise(size: int) -> Cost:
    """One of the other ranks after the other; all that comes is combined into the result."""
    return Cost(rounds=size - 1, sent=_others(size), reduced=_others(size), stored=0)


def reduce_scatter_circulant(size: int) -> Cost:
    """The distances are halved from round to round, rounded up; what goes on is stored."""
    stored = 2 * ((size - 1) // 2) / size
    return Cost(rounds=_rounds(size), sent=_others(size), reduced=_others(size), stored=stored)


def reduce_scatter_direct(size: int, window: int = 32) -> Cost:
    """Every rank sends each of the others its block, and stores what comes until all has come."""
    others = _others(size)
    return Cost(_windows(size, window), sent=others, reduced=others, most_messages=size - 1, stored=others)


def reduce_scatter_balanced_tree(size: int, window: int = 32) -> Cost:
    """As the direct one; what inner nodes of the tree combine is stored once more."""
    direct = reduce_scatter_direct(size, window)
    return replace(direct, stored=2 * _others(size))


def reduce_scatter_read(size: int, window: int = 32) -> Cost:
    """All ranks meet before and after; what is read of others counts as sent."""
    return Cost(rounds=2 * _windows(size, window), sent=_others(size), reduced=_others(size))


def scan_linear(size: int) -> Cost:
    """Along the ranks; those inside combine once and send once."""
    return Cost(rounds=size - 1, sent=min(1, size - 1), reduced=min(1, size - 1))


def exscan_linear(size: int) -> Cost:
    """Only the ranks between the first and the last combine."""
    return Cost(rounds=size - 1, sent=min(1, size - 1), reduced=min(1, max(0, size - 2)))


def scan_recursive_doubling(size: int) -> Cost:
    """The distances double; a rank sends and combines in every round."""
    return Cost(rounds=_rounds(size), sent=_rounds(size), reduced=_rounds(size))


def exscan_recursive_doubling(size: int) -> Cost:
    """One round to pass contributions on, then the scan of p - 1 ranks."""
    first = min(1, size - 1)
    rounds = _rounds(max(1, size - 1))
    return Cost(rounds=first + rounds, sent=first + rounds, reduced=rounds)


def scan_direct(size: int, window: int = 32) -> Cost:
    """The first rank sends to all others, and the last combines what all contribute."""
    return Cost(rounds=_windows(size, window), sent=size - 1, reduced=size - 1)


def exscan_direct(size: int, window: int = 32) -> Cost:
    """The last rank has nothing of its own to combine."""
    return Cost(rounds=_windows(size, window), sent=size - 1, reduced=max(0, size - 2))


# --- moving data ---------------------------------------------------------------------------------------------------


def broadcast_knomial(size: int, radix: int = 4) -> Cost:
    """The root sends in every round."""
    return Cost(rounds=_rounds(size, radix), sent=_most_messages(size, radix), reduced=0)


def broadcast_binomial(size: int) -> Cost:
    """The k-nomial tree of radix 2."""
    return broadcast_knomial(size, radix=2)


def broadcast_chain(size: int) -> Cost:
    """Along the ranks."""
    return Cost(rounds=size - 1, sent=min(1, size - 1), reduced=0)


def broadcast_binary(size: int) -> Cost:
    """Down the complete binary tree."""
    return Cost(rounds=size.bit_length() - 1, sent=min(2, size - 1), reduced=0)


def broadcast_double_binary_tree(size: int) -> Cost:
    """The depth of each tree over p - 1 ranks is ⌊log2(p - 1)⌋, and the root stands above it."""
    return Cost(rounds=_rounds(size), sent=min(1, size - 1), reduced=0)


def broadcast_scatter_ring(size: int) -> Cost:
    """A binomial scatter, then an allgather around a ring."""
    return Cost(rounds=_rounds(size) + size - 1, sent=2 * (size - 1) / size, reduced=0)


def broadcast_scatter_doubling(size: int) -> Cost:
    """A binomial scatter, then an allgather by recursive doubling."""
    return Cost(rounds=2 * _rounds(size), sent=2 * (size - 1) / size, reduced=0)


def broadcast_read(size: int) -> Cost:
    """A flag of the root before and one to it after; what is read of the root counts as sent."""
    return Cost(rounds=2 * min(1, size - 1), sent=min(1, size - 1), reduced=0)


def shares_around(size: int) -> Cost:
    """One of the other ranks after the other."""
    return Cost(rounds=size - 1, sent=_others(size), reduced=0)


def allgather_logarithmic(size: int, radix: int = 2) -> Cost:
    """What a rank has is multiplied by the radix in every round."""
    return Cost(rounds=_rounds(size, radix), sent=_others(size), reduced=0)


def allgather_neighbour_exchange(size: int) -> Cost:
    """Two blocks in each round but the first."""
    return Cost(rounds=size // 2, sent=_others(size), reduced=0)


def shares_in_windows(size: int, window: int = 32) -> Cost:
    """Straight to all others."""
    return Cost(rounds=_windows(size, window), sent=_others(size), reduced=0, most_messages=size - 1)


def allgather_read(size: int, window: int = 32) -> Cost:
    """All ranks meet before and after; what is read of others counts as sent."""
    return Cost(rounds=2 * _windows(size, window), sent=_others(size), reduced=0)


def gather_read(size: int) -> Cost:
    """A flag to the root before and one of it after; the root reads all shares but its own."""
    return Cost(rounds=2 * min(1, size - 1), sent=_others(size), reduced=0)


def gather_linear(size: int, window: int = 32) -> Cost:
    """A rank sends its own share; what the root receives is all but one of them."""
    return Cost(rounds=_windows(size, window), sent=min(1, size - 1) / size, reduced=0)


def gather_binomial(size: int) -> Cost:
    """The rank that sends most hands up the further half of the tree or, if that is small, the half of the nearer."""
    half = 1 << _rounds(size) >> 1
    return Cost(rounds=_rounds(size), sent=max(size - half, half // 2) / size if half else 0, reduced=0)


def scatter_binomial(size: int) -> Cost:
    """The root sends everything but its own share."""
    return Cost(rounds=_rounds(size), sent=_others(size), reduced=0)


def alltoall_bruck(size: int, radix: int = 2) -> Cost:
    """A block is sent once for each digit of its distance that is not 0: (L / 2)·n for a power of two and radix 2."""
    staying = sum(
        size // (radix * distance) * distance + min(size % (radix * distance), distance)
        for distance in distances(size, radix)
    )
    rounds = _rounds(size, radix)
    return Cost(rounds=rounds, sent=(rounds * size - staying) / size, reduced=0)


def barrier_dissemination(size: int, radix: int = 2) -> Cost:
    """Tokens go to k - 1 ranks in each round."""
    return Cost(rounds=_rounds(size, radix), sent=_most_messages(size, radix), reduced=0)


def barrier_direct(size: int, window: int = 32) -> Cost:
    """Tokens go to all others."""
    return Cost(rounds=_windows(size, window), sent=size - 1, reduced=0)


def barrier_tree(size: int, radix: int = 2) -> Cost:
    """Up the tree and down again; the top sends most."""
    return Cost(rounds=2 * _rounds(size, radix), sent=_most_messages(size, radix), reduced=0)


def barrier_flags(size: int, window: int = 32) -> Cost:
    """Flags are no data."""
    return Cost(rounds=_windows(size, window), sent=0, reduced=0)
