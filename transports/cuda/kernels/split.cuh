// Which elements of arrays are processed as packs, and which one by one.
#pragma once

#include <stdint.h>

#include "pack.cuh"

namespace unisono::cuda {

// Elements [0, head) lie before the first pack, and those from head + packs · lanes on behind the last.
struct Split {
  uint64_t head;
  uint64_t packs;
};

template <class Element>
Split split(const void* dst, const void* const* sources, uint64_t sources_count, uint64_t count) {
  const uint64_t before = (pack_nbytes - misalignment(dst, pack_nbytes)) % pack_nbytes;
  bool aligned = before % Element::itemsize == 0 && before / Element::itemsize <= count;
  for (uint64_t s = 0; s < sources_count; ++s)
    aligned = aligned && misalignment(sources[s], pack_nbytes) == misalignment(dst, pack_nbytes);
  if (!aligned) return {count, 0};
  const uint64_t head = before / Element::itemsize;
  return {head, (count - head) / Element::lanes};
}

}  // namespace unisono::cuda
