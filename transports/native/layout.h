// Where the blocks of a plan lie in memory: the native mirror of unisono.algorithms.binding.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "dtype.h"
#include "plan.h"

namespace unisono {

// A run of elements in memory. A bound buffer is a list of them, so that several arrays can be one operand.
struct Extent {
  std::byte* data;
  std::int64_t count;
  DType dtype;
  Combine combine;

  std::size_t itemsize() const { return dtype_table[static_cast<std::size_t>(dtype)].itemsize; }
};

struct Range {
  std::int64_t offset;
  std::int64_t length;
};

// One of `parts` near-equal parts of `length`; the first (length mod parts) are one longer.
Range split(std::int64_t length, std::int64_t parts, std::int64_t part);

// The blocks of one buffer, in elements.
class Blocks {
 public:
  Blocks() = default;
  static Blocks even(std::int64_t elements, std::int64_t blocks);
  static Blocks counted(const std::vector<std::int64_t>& counts);
  static Blocks copies(const Blocks& original, std::int64_t copies);

  Range at(std::int64_t block) const;
  std::int64_t elements() const { return elements_ * copies_; }
  std::int64_t count() const { return blocks_ * copies_; }

 private:
  std::int64_t elements_ = 0;  // of one copy
  std::int64_t blocks_ = 0;    // of one copy
  std::int64_t copies_ = 1;
  std::vector<std::int64_t> offsets_;  // empty: even parts
};

using AllBlocks = std::array<Blocks, buffer_kinds>;
using AllExtents = std::array<std::vector<Extent>, buffer_kinds>;

// What a running plan's operands are resolved against.
struct Memory {
  const Plan* plan;
  const AllBlocks* blocks;
  const AllExtents* extents;
  std::int64_t segments;
};

// The blocks of SCRATCH that is like another buffer, of which the blocks are given.
Blocks scratch_blocks(const ScratchLayout& scratch, const AllBlocks& blocks);

// The extents of SCRATCH, which have no memory yet. Where it has counts of its own, its elements are like those of
// INPUT, which then is one array, although maybe an empty one.
std::vector<Extent> scratch_extents(const Memory& memory);

// Elements that are contiguous and of one type.
struct Piece {
  std::byte* data;
  std::int64_t count;
  DType dtype;
  Combine combine;

  std::size_t itemsize() const { return dtype_table[static_cast<std::size_t>(dtype)].itemsize; }
};

// Walks over the pieces of one operand in one segment, in order.
class Cursor {
 public:
  Cursor() = default;
  Cursor(const Memory& memory, const Operand& operand, std::int64_t iteration, std::int64_t segment);

  bool at_end() const { return block_ == operand_->count; }
  // The piece at the current place; not at the end.
  Piece piece() const;
  void advance(std::int64_t elements);
  // Bytes from the current place to the end.
  std::size_t nbytes() const;

 private:
  void settle();  // step over blocks that are finished or empty in this segment

  const Memory* memory_ = nullptr;
  const Operand* operand_ = nullptr;
  std::int64_t iteration_ = 0;
  std::int64_t segment_ = 0;
  std::int64_t block_ = 0;  // index within the operand
  Range range_{};           // of that block's segment, in elements of the buffer
  std::int64_t done_ = 0;   // elements of the range that have been walked over
};

}  // namespace unisono
