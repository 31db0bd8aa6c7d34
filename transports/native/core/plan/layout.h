// Where the blocks of a plan lie in memory: the native counterpart of unisono.algorithms.ir.binding.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "kernels/dtype.h"
#include "plan/plan.h"

namespace unisono {

//! A range of elements.
struct Range {
  std::int64_t offset;
  std::int64_t length;
};

//! Returns one of `parts` nearly equal parts of `length`. The first (length mod parts) are one element longer.
Range split(std::int64_t length, std::int64_t parts, std::int64_t part);

//! The blocks of one buffer, in elements.
class Blocks {
 public:
  Blocks() = default;
  //! Nearly equal blocks.
  static Blocks even(std::int64_t elements, std::int64_t blocks);
  //! Blocks with the given lengths.
  static Blocks counted(const std::vector<std::int64_t>& counts);
  //! The blocks of a buffer in which each block of `shares` is cut into `parts` nearly equal ones.
  static Blocks in_parts(const Blocks& shares, std::int64_t parts);
  //! The blocks of a buffer that is several copies of another one.
  static Blocks copies(const Blocks& original, std::int64_t copies);

  //! The elements of a block.
  Range at(std::int64_t block) const {
    if (copies_ == 1 && offsets_.empty()) return part_of(block);
    return at_copy(block);
  }
  //! The number of elements of all blocks.
  std::int64_t elements() const { return elements_ * copies_; }
  //! The number of blocks.
  std::int64_t count() const { return blocks_ * copies_; }

 private:
  // The same as `split`, with the division done beforehand.
  Range part_of(std::int64_t block) const {
    return {block * quotient_ + std::min(block, remainder_), quotient_ + (block < remainder_ ? 1 : 0)};
  }
  Range at_copy(std::int64_t block) const;

  std::int64_t elements_ = 0;  // of one copy
  std::int64_t blocks_ = 0;    // of one copy
  std::int64_t copies_ = 1;
  std::int64_t quotient_ = 0;  // of nearly equal blocks
  std::int64_t remainder_ = 0;
  std::vector<std::int64_t> offsets_;  // empty: nearly equal blocks
};

//! The blocks of INPUT, OUTPUT and SCRATCH.
using AllBlocks = std::array<Blocks, buffer_kinds>;
//! The blocks of a SCRATCH that copies another buffer.
Blocks scratch_blocks(const ScratchLayout& scratch, const AllBlocks& blocks);

}  // namespace unisono
