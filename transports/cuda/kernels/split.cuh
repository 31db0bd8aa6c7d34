// Which elements of arrays are processed as packs, and which one by one.
#pragma once

#include <stdint.h>

#include "pack.cuh"

namespace unisono::cuda {

// Elements [0, head) lie before the first pack, and those from head + packs · lanes on behind the last. Packs of the
// destination are aligned. Those of the sources are, too, if all arrays are aligned alike; else `load_shifted` loads
// them.
struct Split {
  uint64_t head;
  uint64_t packs;
  bool alike;
};

template <class Element>
Split split(const void* dst, const void* const* sources, uint64_t sources_count, uint64_t count) {
  const uint64_t before = (pack_nbytes - misalignment(dst, pack_nbytes)) % pack_nbytes;
  bool alike = true;
  for (uint64_t s = 0; s < sources_count; ++s)
    alike = alike && misalignment(sources[s], pack_nbytes) == misalignment(dst, pack_nbytes);
  const uint64_t head = before / Element::itemsize;
  if (before % Element::itemsize != 0 || head > count) return {count, 0, alike};
  return {head, (count - head) / Element::lanes, alike};
}

}  // namespace unisono::cuda
