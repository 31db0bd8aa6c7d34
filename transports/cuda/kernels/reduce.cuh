// Reductions: dst[i] = sources[0][i] ∘ … ∘ sources[k - 1][i] for i < count. An average is divided by a divisor.
//
// Sources are combined in order, in the accumulation type, and rounded once. Arrays must be aligned to the size of
// their parts. A part is an element, or the real or imaginary part of one. dst may be the same as a source, but may not
// overlap one otherwise.
//
// A reduction moves k + 1 bytes for each byte of its result and computes almost nothing, so the memory limits its speed
// if enough loads are under way. So each thread loads some packs of every source before it combines the first two. A
// test checks the compiler's output for that. Elements before the first pack and behind the last are processed one by
// one. If the arrays are not aligned alike, a thread loads one pack of each source at a time, from two aligned packs:
// the second one comes from a cache, because the next thread loads it too.
#pragma once

#include <stdint.h>

#include "elements.cuh"

// Whether a thread loads its next tile before it combines the one before.
#ifndef UNISONO_PIPELINED
#define UNISONO_PIPELINED 0
#endif
// Whether blocks take tiles only as long as all of them have one. Threads take single packs of the rest.
#ifndef UNISONO_WHOLE_WAVES
#define UNISONO_WHOLE_WAVES 0
#endif
// Whether averages multiply by the reciprocal of a divisor that is a power of two, which is exact.
#ifndef UNISONO_RECIPROCALS
#define UNISONO_RECIPROCALS 0
#endif

#include "split.cuh"

namespace unisono::cuda {

template <int k>
struct Sources {
  const void* at[k];
};

// Up to this number of sources there are separate kernels. The kernel for more loops over them, this many at a time.
inline constexpr int most_sources = 8;

// The packs of each source that a thread loads at a time: 8 to 16 in all. It is half as many for 8-bit elements,
// because a pack of them has more states than the registers could hold.
template <class Element, int k>
inline constexpr int unroll = (k <= 2   ? 8
                               : k <= 4 ? 4
                                        : 2) /
                              (Element::itemsize == 1 ? 2 : 1);

// Two tiles of 8-bit floats, whose states are four times as large, need more registers than there are if arithmetic
// converts them.
template <class Element>
inline constexpr bool pipelines =
    UNISONO_PIPELINED && (UNISONO_FLOAT8_IN_FEW_REGISTERS || sizeof(typename Element::State) <= 2 * Element::itemsize);

// A sum without division: a kernel that never divides has more registers left.
namespace {
struct PlainSum : Sum {
  static constexpr bool averages = false;
};
// An average whose divisor is a power of two.
struct AverageByReciprocal : Sum {};
}  // namespace

template <class Op>
inline constexpr bool multiplies = false;
template <>
inline constexpr bool multiplies<AverageByReciprocal> = true;

template <class Op, class T>
T average(T sum, uint64_t divisor) {
  if constexpr (is_float<T> && multiplies<Op>)
    return sum * (static_cast<T>(1) / static_cast<T>(divisor));
  else
    return divide(sum, divisor);
}

// How an operation combines states, and finishes the result.
template <class Op>
struct Fold {
  template <class T, int n>
  static void combine(Lanes<T, n>& states, const Lanes<T, n>& operands) {
#pragma unroll
    for (int i = 0; i < n; ++i) states.values[i] = Op::apply(states.values[i], operands.values[i]);
  }
  // A logical operation turns a single state into "x or x".
  template <class T, int n>
  static void lower(Lanes<T, n>& states, uint64_t sources_count, uint64_t divisor) {
#pragma unroll
    for (int i = 0; i < n; ++i) {
      if constexpr (Op::logical)
        if (sources_count == 1) states.values[i] = LogicalOr::apply(states.values[i], states.values[i]);
      if constexpr (Op::averages) states.values[i] = average<Op>(states.values[i], divisor);
    }
  }
};

template <class Element, class Op, int k>
Pack reduce_packs(const Pack (&loaded)[k], uint64_t divisor) {
  auto states = Element::unpack(loaded[0]);
#pragma unroll
  for (int s = 1; s < k; ++s) Fold<Op>::combine(states, Element::unpack(loaded[s]));
  Fold<Op>::lower(states, k, divisor);
  return Element::pack(states);
}

// The packs of a thread in one tile.
template <int k, int u>
struct Tile {
  Pack packs[u][k];
  void load(const Sources<k>& sources, uint64_t first) {
#pragma unroll
    for (int j = 0; j < u; ++j)
#pragma unroll
      for (int s = 0; s < k; ++s) packs[j][s] = load_pack(sources.at[s], first + j * block_threads);
  }
  template <class Element, class Op>
  void reduce(void* dst, uint64_t first, uint64_t divisor) const {
#pragma unroll
    for (int j = 0; j < u; ++j)
      store_pack(dst, first + j * block_threads, reduce_packs<Element, Op, k>(packs[j], divisor));
  }
};

template <class Element, class Op, int k, int u>
void reduce_tile(void* dst, const Sources<k>& sources, uint64_t first, uint64_t divisor) {
  Tile<k, u> tile;
  tile.load(sources, first);
  tile.template reduce<Element, Op>(dst, first, divisor);
}

// Two tiles in turns: the loads of one are under way while the other one is combined. dst may be a source, because no
// pack of one tile is in the other.
template <class Element, class Op, int k, int u>
void reduce_pipelined(void* dst, const Sources<k>& sources, uint64_t tiles, uint64_t divisor) {
  const auto place = [](uint64_t t) { return t * block_threads * u + threadIdx.x; };
  uint64_t t = blockIdx.x, next = t + gridDim.x;
  if (t >= tiles) return;
  Tile<k, u> even, odd;
  even.load(sources, place(t));
  for (;; t = next + gridDim.x, next = t + gridDim.x) {
    if (next < tiles) odd.load(sources, place(next));
    __syncwarp();  // nothing is combined before these loads are under way
    even.template reduce<Element, Op>(dst, place(t), divisor);
    if (next >= tiles) return;
    if (next + gridDim.x < tiles) even.load(sources, place(next + gridDim.x));
    __syncwarp();
    odd.template reduce<Element, Op>(dst, place(next), divisor);
    if (next + gridDim.x >= tiles) return;
  }
}

template <class Element, class Op, int k>
void reduce_shifted(void* dst, const Sources<k>& sources, uint64_t packs, uint64_t divisor) {
  for (uint64_t p = thread_of_grid(); p < packs; p += threads_of_grid()) {
    Pack loaded[k];
#pragma unroll
    for (int s = 0; s < k; ++s) loaded[s] = load_shifted(sources.at[s], p);
    store_pack(dst, p, reduce_packs<Element, Op, k>(loaded, divisor));
  }
}

template <class Element, class Op, int k>
void reduce_all_packs(void* dst, const Sources<k>& sources, uint64_t packs, uint64_t divisor) {
  constexpr int u = pipelines<Element> ? (unroll<Element, k> + 1) / 2 : unroll<Element, k>;
  constexpr uint64_t tile = block_threads * u;
#if UNISONO_WHOLE_WAVES
  const uint64_t tiles = packs / tile / gridDim.x * gridDim.x;
#else
  // If tiles would leave most multiprocessors idle, threads take single packs.
  const uint64_t tiles = packs / tile * 4 < gridDim.x ? 0 : packs / tile;
#endif
  if constexpr (pipelines<Element>)
    reduce_pipelined<Element, Op, k, u>(dst, sources, tiles, divisor);
  else
    for (uint64_t t = blockIdx.x; t < tiles; t += gridDim.x)
      reduce_tile<Element, Op, k, u>(dst, sources, t * tile + threadIdx.x, divisor);
  for (uint64_t p = tiles * tile + thread_of_grid(); p < packs; p += threads_of_grid())
    reduce_tile<Element, Op, k, 1>(dst, sources, p, divisor);
}

template <class Element, class Op, int k>
void reduce_elements(void* dst, const Sources<k>& sources, uint64_t count, uint64_t divisor) {
  using State = typename Element::State;
  const Split parts = split<Element>(dst, sources.at, k, count);
  const uint64_t between = parts.packs * Element::lanes;
  for (uint64_t t = thread_of_grid(); t < count - between; t += threads_of_grid()) {
    const uint64_t i = t < parts.head ? t : t + between;
    State loaded[k];
#pragma unroll
    for (int s = 0; s < k; ++s) loaded[s] = Element::load(sources.at[s], i);
    Lanes<State, 1> state = {loaded[0]};
#pragma unroll
    for (int s = 1; s < k; ++s) Fold<Op>::combine(state, Lanes<State, 1>{loaded[s]});
    Fold<Op>::lower(state, k, divisor);
    Element::store(dst, i, state.values[0]);
  }
  Sources<k> packed;
#pragma unroll
  for (int s = 0; s < k; ++s) packed.at[s] = shifted(sources.at[s], parts.head * Element::itemsize);
  void* first = shifted(dst, parts.head * Element::itemsize);
  if (parts.alike)
    reduce_all_packs<Element, Op, k>(first, packed, parts.packs, divisor);
  else
    reduce_shifted<Element, Op, k>(first, packed, parts.packs, divisor);
}

template <class Element, class Op, int k>
void reduce(void* dst, const Sources<k>& sources, uint64_t count, uint64_t divisor) {
#if UNISONO_RECIPROCALS
  if constexpr (Op::averages)
    if ((divisor & (divisor - 1)) == 0)
      return reduce_elements<Element, AverageByReciprocal, k>(dst, sources, count, divisor);
#endif
  reduce_elements<Element, Op, k>(dst, sources, count, divisor);
}

// For any number of sources, whose addresses lie in device memory.
template <class Element, class Op, bool alike>
Pack reduce_many_packs(const void* const* sources, uint64_t sources_count, uint64_t offset, uint64_t divisor) {
  const auto load = [&](uint64_t s) {
    const void* from = shifted(sources[s], offset);
    return alike ? load_pack(from, 0) : load_shifted(from, 0);
  };
  auto states = Element::unpack(load(0));
  for (uint64_t first = 1; first < sources_count; first += most_sources) {
    Pack loaded[most_sources];
#pragma unroll
    for (int s = 0; s < most_sources; ++s)
      if (first + s < sources_count) loaded[s] = load(first + s);
#pragma unroll
    for (int s = 0; s < most_sources; ++s)
      if (first + s < sources_count) Fold<Op>::combine(states, Element::unpack(loaded[s]));
  }
  Fold<Op>::lower(states, sources_count, divisor);
  return Element::pack(states);
}

template <class Element, class Op, bool alike>
void reduce_all_packs_of_many(void* dst, const void* const* sources, uint64_t sources_count, const Split& parts,
                              uint64_t divisor) {
  for (uint64_t p = thread_of_grid(); p < parts.packs; p += threads_of_grid()) {
    const uint64_t offset = parts.head * Element::itemsize + p * pack_nbytes;
    const Pack pack = reduce_many_packs<Element, Op, alike>(sources, sources_count, offset, divisor);
    store_pack(shifted(dst, offset), 0, pack);
  }
}

template <class Element, class Op>
void reduce_many(void* dst, const void* const* sources, uint64_t sources_count, uint64_t count, uint64_t divisor) {
  using State = typename Element::State;
  const Split parts = split<Element>(dst, sources, sources_count, count);
  const uint64_t between = parts.packs * Element::lanes;
  for (uint64_t t = thread_of_grid(); t < count - between; t += threads_of_grid()) {
    const uint64_t i = t < parts.head ? t : t + between;
    Lanes<State, 1> state = {Element::load(sources[0], i)};
    for (uint64_t s = 1; s < sources_count; ++s)
      Fold<Op>::combine(state, Lanes<State, 1>{Element::load(sources[s], i)});
    Fold<Op>::lower(state, sources_count, divisor);
    Element::store(dst, i, state.values[0]);
  }
  if (parts.alike)
    reduce_all_packs_of_many<Element, Op, true>(dst, sources, sources_count, parts, divisor);
  else
    reduce_all_packs_of_many<Element, Op, false>(dst, sources, sources_count, parts, divisor);
}

}  // namespace unisono::cuda

// Defines the kernel `name` for k sources of an element type that has `parts` parts.
#define UNISONO_REDUCE(name, parts, k, ...)                                                             \
  UNISONO_KERNEL name(void* dst, unisono::cuda::Sources<k> sources, uint64_t count, uint64_t divisor) { \
    unisono::cuda::reduce<__VA_ARGS__, k>(dst, sources, parts * count, divisor);                        \
  }

// Defines the kernel `name` for any number of sources.
#define UNISONO_REDUCE_MANY(name, parts, ...)                                                        \
  UNISONO_KERNEL name(void* dst, const void* const* sources, uint64_t sources_count, uint64_t count, \
                      uint64_t divisor) {                                                            \
    unisono::cuda::reduce_many<__VA_ARGS__>(dst, sources, sources_count, parts * count, divisor);    \
  }
