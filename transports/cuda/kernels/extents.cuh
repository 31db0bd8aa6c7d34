// Copies many extents by one kernel. It packs many small arrays into one bucket, and unpacks them.
//
// Every block of threads copies one extent after the other, so the table's author splits large ones. An extent is
// copied in units of 16 bytes if source and destination are aligned alike, else of 4 bytes if possible, else of single
// bytes.
#pragma once

#include <stdint.h>

#include "pack.cuh"

namespace unisono::cuda {

struct Extent {
  void* dst;
  const void* src;
  uint64_t nbytes;
};

inline constexpr int copies_under_way = 4;

template <class Unit>
void copy_units(void* dst, const void* src, uint64_t count) {
  auto* to = static_cast<Unit*>(dst);
  const auto* from = static_cast<const Unit*>(src);
  constexpr uint64_t tile = block_threads * copies_under_way;
  const uint64_t tiles = count / tile;
  for (uint64_t first = threadIdx.x; first < tiles * tile; first += tile) {
    Unit loaded[copies_under_way];
#pragma unroll
    for (int j = 0; j < copies_under_way; ++j) loaded[j] = from[first + j * block_threads];
#pragma unroll
    for (int j = 0; j < copies_under_way; ++j) to[first + j * block_threads] = loaded[j];
  }
  for (uint64_t i = tiles * tile + threadIdx.x; i < count; i += block_threads) to[i] = from[i];
}

// Copies the whole units of an extent, and the bytes before and behind them.
template <class Unit>
void copy_by(const Extent& extent) {
  const uint64_t before = (sizeof(Unit) - misalignment(extent.dst, sizeof(Unit))) % sizeof(Unit);
  const uint64_t head = before < extent.nbytes ? before : extent.nbytes;
  const uint64_t body = (extent.nbytes - head) / sizeof(Unit) * sizeof(Unit);
  const uint64_t tail = head + body;
  copy_units<char>(extent.dst, extent.src, head);
  copy_units<Unit>(shifted(extent.dst, head), shifted(extent.src, head), body / sizeof(Unit));
  copy_units<char>(shifted(extent.dst, tail), shifted(extent.src, tail), extent.nbytes - tail);
}

inline void copy_extent(const Extent& extent) {
  if (misalignment(extent.dst, pack_nbytes) == misalignment(extent.src, pack_nbytes))
    copy_by<Pack>(extent);
  else if (misalignment(extent.dst, 4) == misalignment(extent.src, 4))
    copy_by<uint32_t>(extent);
  else
    copy_units<char>(extent.dst, extent.src, extent.nbytes);
}

}  // namespace unisono::cuda

UNISONO_KERNEL copy_extents(const unisono::cuda::Extent* extents, uint64_t count) {
  for (uint64_t e = blockIdx.x; e < count; e += gridDim.x) unisono::cuda::copy_extent(extents[e]);
}
