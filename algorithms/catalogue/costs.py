"""The costs of the algorithms of the registry in closed form. A function has the name of its builder.

p is the number of ranks, k the radix, and L = ⌈log_k p⌉. Costs are multiples of a vector:

- reductions and alltoall: the INPUT of a rank
- broadcast: the data of the root
- gather and scatter: the blocks of all ranks, as the root has them
- allgather: the OUTPUT of a rank
- barrier: the token

An algorithm with a root has the cost of its most expensive root. A function takes those parameters of the builder that
change the cost.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from unisono.algorithms.builders.arguments import square_dims
from unisono.algorithms.builders.folding import fold
from unisono.algorithms.builders.lane_pieces import distances
from unisono.algorithms.catalogue.algorithm import Cost


def _rounds(size: int, radix: int = 2) -> int:
    """Return the number of rounds in which a set that grows `radix`-fold reaches `size` ranks: ⌈log_radix size⌉."""
    return len(list(distances(size, radix)))


def _others(size: int) -> float:
    """Return the fraction of the vector that belongs to all ranks but one: (p − 1) / p."""
    return (size - 1) / size


def _windows(size: int, window: int) -> int:
    """Return how many windows a rank needs to exchange messages with all other ranks, `window` of them at a time."""
    return -(-(size - 1) // window)


def _most_messages(size: int, radix: int) -> int:
    """Return how many messages the root of a k-nomial tree sends: k − 1 per round, fewer in a partial last round."""
    rounds = _rounds(size, radix)
    return (radix - 1) * (rounds - 1) - (-size // radix ** (rounds - 1)) - 1 if rounds else 0


def _folded(size: int) -> tuple[int, int]:
    """Return ⌊log2 p⌋, and 1 if some ranks are folded, because p is not a power of two, else 0."""
    rounds = size.bit_length() - 1
    return rounds, int(size > 1 << rounds)


def _double_tree_path(size: int) -> float:
    """Return the longest path in two binary trees with half of the vector each, in which inner ranks have two children.

    The root stands above both trees. The path is (⌈log2 p⌉ + ⌊log2 p⌋) / 2 vectors long.
    """
    rounds, _ = _folded(size)
    return (_rounds(size) + rounds) / 2


def _subtree(size: int, aggregate: int | None) -> int:
    """Return the ranks of a subtree of PAT: the least power of two that keeps messages within `aggregate`."""
    return 1 << (-(-size // (aggregate or size)) - 1).bit_length()


def _ring_rounds(size: int, dims: Sequence[int]) -> int:
    """Return the rounds of one phase on a torus: those of a ring in each dimension."""
    return sum(length - 1 for length in dims or square_dims(size))


def _in_lanes(cost: Cost, messages: int, lanes: int) -> Cost:
    """Return the cost of an algorithm that runs on `lanes` parts of the vector, with `messages` messages each."""
    return replace(cost, most_messages=messages * lanes) if lanes > 1 else cost


# --- reducing data -------------------------------------------------------------------------------------------------


def allreduce_direct(size: int, window: int = 32) -> Cost:
    """Every rank sends its vector to all other ranks."""
    return Cost(rounds=_windows(size, window), sent=size - 1, reduced=size - 1)


def allreduce_ring(size: int) -> Cost:
    """A reduce-scatter, then an allgather."""
    return Cost(rounds=2 * (size - 1), sent=2 * (size - 1) / size, reduced=_others(size))


def allreduce_rings(size: int, lanes: int = 2) -> Cost:
    """Several rings side by side, each with a part of the vector; they take the same time."""
    return replace(allreduce_ring(size), most_messages=2 * (size - 1) * lanes)


def allreduce_recursive_doubling(size: int) -> Cost:
    """A rank that another rank is folded onto combines and sends once more. Folding takes two more rounds."""
    rounds, fold = _folded(size)
    return Cost(rounds=rounds + 2 * fold, sent=rounds + fold, reduced=rounds + fold)


def allreduce_recursive_multiplying(size: int, radix: int = 4) -> Cost:
    """A rank exchanges vectors with k − 1 ranks a round. The longest run of folded ranks has ⌈p / k^rounds⌉ ranks."""
    folding = fold(size, max(2, min(radix, size)))
    exchanged = folding.rounds * (folding.radix - 1)
    folded = -(-size // folding.positions) - 1
    return Cost(rounds=folding.rounds + 2 * (folded > 0), sent=exchanged + folded, reduced=exchanged + folded)


def allreduce_rabenseifner(size: int) -> Cost:
    """Halving, then doubling. A rank that others are folded onto moves one more vector each way."""
    rounds, fold = _folded(size)
    moved = _others(1 << rounds)
    return Cost(rounds=2 * (rounds + fold), sent=2 * moved + fold, reduced=moved + fold)


def allreduce_swing(size: int, lanes: int = 1) -> Cost:
    """The exchanges of Rabenseifner's algorithm, over other distances."""
    return _in_lanes(allreduce_rabenseifner(size), allreduce_rabenseifner(size).rounds, lanes)


def allreduce_swing_doubling(size: int, lanes: int = 1) -> Cost:
    """The exchanges of recursive doubling, over other distances. A rank sends one message for each vector."""
    cost = allreduce_recursive_doubling(size)
    return _in_lanes(cost, int(cost.sent), lanes)


def allreduce_torus(size: int, dims: Sequence[int] = (), lanes: int = 1) -> Cost:
    """A reduce-scatter, then an allgather, each around a ring in each dimension."""
    rounds = 2 * _ring_rounds(size, dims)
    return _in_lanes(Cost(rounds, sent=2 * (size - 1) / size, reduced=_others(size)), rounds, lanes)


def allreduce_circulant(size: int) -> Cost:
    """A reduce-scatter, then an allgather."""
    return Cost(rounds=2 * _rounds(size), sent=2 * (size - 1) / size, reduced=_others(size))


def allreduce_reduce_broadcast(size: int) -> Cost:
    """An inner rank below the root sends one vector up and two down. Trees of 4 or more ranks have such a rank."""
    return Cost(rounds=2 * (size.bit_length() - 1), sent=min(3, size - 1), reduced=min(2, size - 1))


def allreduce_chain(size: int) -> Cost:
    """A reduce to the first rank, and a broadcast back."""
    return Cost(rounds=2 * (size - 1), sent=min(2, size - 1), reduced=min(1, size - 1))


def allreduce_double_binary_tree(size: int) -> Cost:
    """A rank sends half a vector three times as an inner node of one tree, and once as a leaf of the other."""
    return Cost(
        rounds=2 * (size.bit_length() - 1), sent=min(4, size) / 2 if size > 1 else 0, reduced=min(2, size - 1) / 2
    )


def allreduce_two_exchanges(size: int, window: int = 32) -> Cost:
    """Two direct exchanges of all blocks except the rank's own."""
    rounds, messages = 2 * _windows(size, window), 2 * (size - 1)
    return Cost(rounds, sent=messages / size, reduced=_others(size), most_messages=messages)


def allreduce_one_shot(size: int, window: int = 32) -> Cost:
    """All ranks exchange flags before and after the reads. Reading a peer's memory counts as sending."""
    return Cost(rounds=2 * _windows(size, window), sent=size - 1, reduced=size - 1)


def allreduce_two_shot(size: int, window: int = 32) -> Cost:
    """All ranks exchange flags before, between and after the two phases of reads. A read counts as sending."""
    return Cost(rounds=3 * _windows(size, window), sent=2 * (size - 1) / size, reduced=_others(size))


def reduce_bine(size: int) -> Cost:
    """The root receives in every round."""
    return reduce_binomial(size)


def reduce_read(size: int) -> Cost:
    """All other ranks raise flags at the root, the root reads their vectors, and then it raises a flag at each."""
    return Cost(rounds=2 * min(1, size - 1), sent=size - 1, reduced=size - 1)


def reduce_binomial(size: int) -> Cost:
    """The most expensive root is rank 0, which receives in every round."""
    return Cost(rounds=_rounds(size), sent=min(1, size - 1), reduced=_rounds(size))


def reduce_knomial(size: int, radix: int = 4) -> Cost:
    """The most expensive root is rank 0, which receives from k − 1 ranks per round, or fewer in the last round."""
    return Cost(rounds=_rounds(size, radix), sent=min(1, size - 1), reduced=_most_messages(size, radix))


def reduce_all_pairs(size: int, window: int = 32) -> Cost:
    """Every rank sends the other ranks their blocks, then its result to the root; the root sends only the blocks."""
    return Cost(rounds=2 * _windows(size, window), sent=min(1, size - 1), reduced=_others(size))


def reduce_chain(size: int) -> Cost:
    """A rank inside the chain receives once and sends once."""
    return Cost(rounds=size - 1, sent=min(1, size - 1), reduced=min(1, size - 1), path=size - 1)


def reduce_binary(size: int) -> Cost:
    """The most expensive root is rank 0, above one tree of all other ranks, whose depth is ⌊log2(p − 1)⌋.

    Every inner rank of the tree has two children.
    """
    path = max(0, 2 * _double_tree_path(size) - 1)
    return Cost(rounds=_rounds(size), sent=min(1, size - 1), reduced=min(2, size - 1), path=path)


def reduce_rabenseifner(size: int) -> Cost:
    """The busiest rank sends half of the vector in the last round of the gather."""
    rounds, fold = _folded(size)
    moved = _others(1 << rounds)
    return Cost(rounds=2 * rounds + fold, sent=moved + 0.5 * (size > 1), reduced=moved + fold)


def reduce_double_binary_tree(size: int) -> Cost:
    """Each tree has depth ⌊log2(p − 1)⌋, and the root stands above both trees."""
    path = _double_tree_path(size)
    return Cost(rounds=_rounds(size), sent=min(1, size - 1), reduced=min(1, size - 1), path=path)


def reduce_circulant_blocks(size: int, blocks: int = 8) -> Cost:
    """A broadcast run backwards: the root receives a block in every round, and combines it with its own."""
    broadcast = broadcast_circulant_blocks(size, blocks)
    return Cost(broadcast.rounds, sent=min(1, size - 1), reduced=broadcast.sent)


def reduce_scatter_recursive_halving(size: int) -> Cost:
    """The first ranks are folded in pairs. In every round the first pair keeps as many blocks as any other.

    A rank that stands aside sends the whole vector. Any other rank sends, over all rounds, the vector without its own
    block.
    """
    rounds, fold = _folded(size)
    pairs = size - (1 << rounds)
    kept = sum((1 << bit) + min(1 << bit, pairs) for bit in range(rounds))
    combined = (fold * size + kept) / size
    return Cost(rounds=rounds + 2 * fold, sent=1 if fold else _others(size), reduced=combined, stored=combined)


def reduce_scatter_ring(size: int) -> Cost:
    """A rank stores every block that it passes on. The last block that it receives becomes its result instead."""
    stored = max(0, size - 2) / size
    return Cost(rounds=size - 1, sent=_others(size), reduced=_others(size), stored=stored)


def reduce_scatter_pairwise(size: int) -> Cost:
    """Every rank has one partner in each of p − 1 rounds. It combines a received block at once, and stores nothing."""
    return Cost(rounds=size - 1, sent=_others(size), reduced=_others(size), stored=0)


def reduce_scatter_circulant(size: int) -> Cost:
    """The distances are halved in each round, rounded up. A block that is sent on later is stored."""
    stored = 2 * ((size - 1) // 2) / size
    return Cost(rounds=_rounds(size), sent=_others(size), reduced=_others(size), stored=stored)


def reduce_scatter_swing(size: int, lanes: int = 1) -> Cost:
    """A rank stores half of the blocks in the first round, and half as many in each later one, except the last."""
    stored = max(0, size - 2) / size
    rounds = _rounds(size)
    return _in_lanes(Cost(rounds, sent=_others(size), reduced=_others(size), stored=stored), rounds, lanes)


def reduce_scatter_torus(size: int, dims: Sequence[int] = (), lanes: int = 1) -> Cost:
    """A ring in each dimension. A rank stores every block that it receives, but for its own in the last round."""
    cost, rounds = reduce_scatter_ring(size), _ring_rounds(size, dims)
    return _in_lanes(replace(cost, rounds=rounds), rounds, lanes)


def reduce_scatter_pat(size: int, aggregate: int | None = None) -> Cost:
    """As the allgather. If the number of ranks is odd, a rank copies the block for which nothing arrives at first."""
    copies = size % 2 * (_subtree(size, aggregate) < size)
    return replace(allgather_pat(size, aggregate), reduced=_others(size), stored=(max(0, size - 2) + copies) / size)


def reduce_scatter_direct(size: int, window: int = 32) -> Cost:
    """Every rank sends each other rank its block. It stores the received blocks and combines them in the end."""
    others = _others(size)
    return Cost(_windows(size, window), sent=others, reduced=others, most_messages=size - 1, stored=others)


def reduce_scatter_balanced_tree(size: int, window: int = 32) -> Cost:
    """As `reduce_scatter_direct`, but a rank also stores the result of each inner node of the tree."""
    direct = reduce_scatter_direct(size, window)
    return replace(direct, stored=2 * _others(size))


def reduce_scatter_read(size: int, window: int = 32) -> Cost:
    """All ranks exchange flags before and after the reads. Reading a peer's memory counts as sending."""
    return Cost(rounds=2 * _windows(size, window), sent=_others(size), reduced=_others(size))


def scan_linear(size: int) -> Cost:
    """A rank between the first and the last combines once and sends once."""
    return Cost(rounds=size - 1, sent=min(1, size - 1), reduced=min(1, size - 1), path=size - 1)


def exscan_linear(size: int) -> Cost:
    """Only the ranks between the first and the last combine."""
    return Cost(rounds=size - 1, sent=min(1, size - 1), reduced=min(1, max(0, size - 2)), path=size - 1)


def scan_recursive_doubling(size: int) -> Cost:
    """The distance doubles in each round. The busiest rank sends and combines in every round."""
    return Cost(rounds=_rounds(size), sent=_rounds(size), reduced=_rounds(size))


def exscan_recursive_doubling(size: int) -> Cost:
    """One round passes the contributions on to the next rank; then p − 1 ranks do a scan."""
    first = min(1, size - 1)
    rounds = _rounds(max(1, size - 1))
    return Cost(rounds=first + rounds, sent=first + rounds, reduced=rounds)


def scan_direct(size: int, window: int = 32) -> Cost:
    """The first rank sends to all others, and the last rank combines all contributions."""
    return Cost(rounds=_windows(size, window), sent=size - 1, reduced=size - 1)


def exscan_direct(size: int, window: int = 32) -> Cost:
    """The first rank sends to all others. The last rank combines all contributions but its own."""
    return Cost(rounds=_windows(size, window), sent=size - 1, reduced=max(0, size - 2))


# --- moving data ---------------------------------------------------------------------------------------------------


def broadcast_knomial(size: int, radix: int = 4) -> Cost:
    """The root sends in every round."""
    return Cost(rounds=_rounds(size, radix), sent=_most_messages(size, radix), reduced=0)


def broadcast_binomial(size: int) -> Cost:
    """A k-nomial tree of radix 2."""
    return broadcast_knomial(size, radix=2)


def broadcast_bine(size: int) -> Cost:
    """The root sends in every round."""
    return broadcast_binomial(size)


def broadcast_chain(size: int) -> Cost:
    """Every rank but the last sends the vector once."""
    return Cost(rounds=size - 1, sent=min(1, size - 1), reduced=0, path=size - 1)


def broadcast_binary(size: int) -> Cost:
    """A complete binary tree: inner ranks send the vector twice.

    Rank v − 1 is ⌊log2 v⌋ levels below the root. Each set bit of v after the first stands for a second child on its
    path, which receives the vector after the first child. The path is longest if v = 2^k − 1 or v = 3·2^k − 1.
    """
    path = (size + 1).bit_length() - 2 + ((2 * size + 2) // 3).bit_length() - 1
    return Cost(rounds=size.bit_length() - 1, sent=min(2, size - 1), reduced=0, path=path)


def broadcast_double_binary_tree(size: int) -> Cost:
    """Each tree over p − 1 ranks has depth ⌊log2(p − 1)⌋, and the root stands above both."""
    return Cost(rounds=_rounds(size), sent=min(1, size - 1), reduced=0, path=_double_tree_path(size))


def broadcast_circulant_blocks(size: int, blocks: int = 8) -> Cost:
    """The root sends one block in each of n − 1 + L rounds, where n is the number of blocks."""
    rounds = blocks - 1 + _rounds(size) if size > 1 else 0
    return Cost(rounds, sent=rounds / blocks, reduced=0)


def broadcast_scatter_ring(size: int) -> Cost:
    """A binomial scatter, then an allgather around a ring."""
    return Cost(rounds=_rounds(size) + size - 1, sent=2 * (size - 1) / size, reduced=0)


def broadcast_scatter_doubling(size: int) -> Cost:
    """A binomial scatter, then an allgather by recursive doubling."""
    return Cost(rounds=2 * _rounds(size), sent=2 * (size - 1) / size, reduced=0)


def broadcast_read(size: int) -> Cost:
    """The root raises a flag at each rank, they read its data, and raise flags at the root. Reads count as sent."""
    return Cost(rounds=2 * min(1, size - 1), sent=min(1, size - 1), reduced=0)


def shares_around(size: int) -> Cost:
    """Every rank sends one share to one other rank in each of p − 1 rounds."""
    return Cost(rounds=size - 1, sent=_others(size), reduced=0)


def allgather_logarithmic(size: int, radix: int = 2) -> Cost:
    """The number of blocks that a rank has grows k-fold in every round."""
    return Cost(rounds=_rounds(size, radix), sent=_others(size), reduced=0)


def allgather_swing(size: int, lanes: int = 1) -> Cost:
    """The number of blocks that a rank has doubles in every round."""
    return _in_lanes(allgather_logarithmic(size), _rounds(size), lanes)


def allgather_torus(size: int, dims: Sequence[int] = (), lanes: int = 1) -> Cost:
    """A ring in each dimension."""
    rounds = _ring_rounds(size, dims)
    return _in_lanes(Cost(rounds, sent=_others(size), reduced=0), rounds, lanes)


def allgather_pat(size: int, aggregate: int | None = None) -> Cost:
    """The links between subtrees take a round for each doubling of their number, and those inside one round each."""
    inner = _subtree(size, aggregate)
    return Cost(min(inner, size) - 1 + _rounds(-(-size // inner)), sent=_others(size), reduced=0)


def allgather_neighbour_exchange(size: int) -> Cost:
    """A rank sends one block in the first round, and two blocks in each later round."""
    return Cost(rounds=size // 2, sent=_others(size), reduced=0)


def shares_in_windows(size: int, window: int = 32) -> Cost:
    """Every rank sends one share to each other rank, and to `window` ranks in a round."""
    return Cost(rounds=_windows(size, window), sent=_others(size), reduced=0, most_messages=size - 1)


def allgather_read(size: int, window: int = 32) -> Cost:
    """All ranks exchange flags before and after the reads. Reading a peer's memory counts as sending."""
    return Cost(rounds=2 * _windows(size, window), sent=_others(size), reduced=0)


def gather_read(size: int) -> Cost:
    """All other ranks raise flags at the root, the root reads their shares, and then it raises a flag at each."""
    return Cost(rounds=2 * min(1, size - 1), sent=_others(size), reduced=0)


def scatter_read(size: int) -> Cost:
    """The root raises a flag at each rank, they read a share each, and raise flags at the root. Reads count as sent."""
    return Cost(rounds=2 * min(1, size - 1), sent=min(1, size - 1) / size, reduced=0)


def gather_linear(size: int, window: int = 32) -> Cost:
    """Every rank but the root sends its own share."""
    return Cost(rounds=_windows(size, window), sent=min(1, size - 1) / size, reduced=0)


def gather_binomial(size: int) -> Cost:
    """The busiest sender passes up the shares of the far half of the tree or, if it is small, half of the near half."""
    half = 1 << _rounds(size) >> 1
    return Cost(rounds=_rounds(size), sent=max(size - half, half // 2) / size if half else 0, reduced=0)


def gather_bine(size: int) -> Cost:
    """The busiest sender passes up the farther half of the places. Some places have two ranks."""
    rounds, _ = _folded(size)
    if not rounds:
        return Cost(rounds=0, sent=0, reduced=0)
    far = 1 << (rounds - 1)
    nearer = far - 2 * (4 ** ((rounds - 1) // 2) - 1) // 3  # places from the root on, before the farther half
    folded = size - 2 * far  # the first places have two ranks
    return Cost(_rounds(size), sent=(far + max(0, min(far, folded - nearer))) / size, reduced=0)


def scatter_bine(size: int) -> Cost:
    """The root sends everything but its own share."""
    return scatter_binomial(size)


def scatter_binomial(size: int) -> Cost:
    """The root sends everything but its own share."""
    return Cost(rounds=_rounds(size), sent=_others(size), reduced=0)


def alltoall_bruck(size: int, radix: int = 2) -> Cost:
    """A block is sent once per non-zero digit of its distance: L/2 vectors for a power of two and radix 2."""
    staying = sum(
        size // (radix * distance) * distance + min(size % (radix * distance), distance)
        for distance in distances(size, radix)
    )
    rounds = _rounds(size, radix)
    return Cost(rounds=rounds, sent=(rounds * size - staying) / size, reduced=0)


def barrier_dissemination(size: int, radix: int = 2) -> Cost:
    """Every rank sends a token to k − 1 ranks in each round."""
    return Cost(rounds=_rounds(size, radix), sent=_most_messages(size, radix), reduced=0)


def barrier_direct(size: int, window: int = 32) -> Cost:
    """Every rank sends a token to all other ranks."""
    return Cost(rounds=_windows(size, window), sent=size - 1, reduced=0)


def barrier_tree(size: int, radix: int = 2) -> Cost:
    """Tokens go up the tree and down again. The root sends most of them."""
    return Cost(rounds=2 * _rounds(size, radix), sent=_most_messages(size, radix), reduced=0)


def barrier_flags(size: int, window: int = 32) -> Cost:
    """Flags carry no data, so nothing counts as sent."""
    return Cost(rounds=_windows(size, window), sent=0, reduced=0)
