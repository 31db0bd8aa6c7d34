// dst[i] = source[i] · factor for i < count: a rank's contribution to a sum with factors.
//
// Products are computed in the accumulation type, which is also the type of the factor, and rounded once. Arrays must
// be aligned to the size of their elements (for complex numbers, of their parts). dst may be the source, but may not
// overlap it otherwise.
#pragma once

#include <stdint.h>

#include "elements.cuh"
#include "split.cuh"

namespace unisono::cuda {

inline constexpr int scaled_packs = 8;  // packs that a thread loads at a time

template <class Element>
Pack scaled(const Pack& pack, typename Element::State factor) {
  auto states = Element::unpack(pack);
#pragma unroll
  for (int i = 0; i < Element::lanes; ++i) states.values[i] = Prod::apply(states.values[i], factor);
  return Element::pack(states);
}

template <class Element>
void scale_packs(void* dst, const void* source, uint64_t packs, bool alike, typename Element::State factor) {
  if (!alike) {
    for (uint64_t p = thread_of_grid(); p < packs; p += threads_of_grid())
      store_pack(dst, p, scaled<Element>(load_shifted(source, p), factor));
    return;
  }
  constexpr uint64_t tile = block_threads * scaled_packs;
  const uint64_t tiles = packs / tile;
  for (uint64_t t = blockIdx.x; t < tiles; t += gridDim.x) {
    const uint64_t first = t * tile + threadIdx.x;
    Pack loaded[scaled_packs];
#pragma unroll
    for (int j = 0; j < scaled_packs; ++j) loaded[j] = load_pack(source, first + j * block_threads);
#pragma unroll
    for (int j = 0; j < scaled_packs; ++j)
      store_pack(dst, first + j * block_threads, scaled<Element>(loaded[j], factor));
  }
  for (uint64_t p = tiles * tile + thread_of_grid(); p < packs; p += threads_of_grid())
    store_pack(dst, p, scaled<Element>(load_pack(source, p), factor));
}

template <class Element>
void scale(void* dst, const void* source, typename Element::State factor, uint64_t count) {
  const Split parts = split<Element>(dst, &source, 1, count);
  const uint64_t between = parts.packs * Element::lanes;
  for (uint64_t t = thread_of_grid(); t < count - between; t += threads_of_grid()) {
    const uint64_t i = t < parts.head ? t : t + between;
    Element::store(dst, i, Prod::apply(Element::load(source, i), factor));
  }
  const uint64_t start = parts.head * Element::itemsize;
  scale_packs<Element>(shifted(dst, start), shifted(source, start), parts.packs, parts.alike, factor);
}

}  // namespace unisono::cuda

#define UNISONO_SCALE(name, ...)                                                                           \
  UNISONO_KERNEL name(void* dst, const void* source, typename __VA_ARGS__::State factor, uint64_t count) { \
    unisono::cuda::scale<__VA_ARGS__>(dst, source, factor, count);                                         \
  }
