#include "plan/layout.h"

#include <algorithm>
#include <stdexcept>

namespace unisono {
Range split(std::int64_t length, std::int64_t parts, std::int64_t part) {
  const std::int64_t quotient = length / parts;
  const std::int64_t remainder = length % parts;
  return {part * quotient + std::min(part, remainder), quotient + (part < remainder ? 1 : 0)};
}

Blocks Blocks::even(std::int64_t elements, std::int64_t blocks) {
  Blocks result;
  result.elements_ = blocks == 0 ? 0 : elements;
  result.blocks_ = blocks;
  result.quotient_ = blocks == 0 ? 0 : elements / blocks;
  result.remainder_ = blocks == 0 ? 0 : elements % blocks;
  return result;
}

Blocks Blocks::counted(const std::vector<std::int64_t>& counts) {
  Blocks result;
  result.blocks_ = static_cast<std::int64_t>(counts.size());
  result.offsets_.push_back(0);
  for (const std::int64_t count : counts) {
    if (count < 0) throw std::invalid_argument("a count is negative");
    result.offsets_.push_back(result.offsets_.back() + count);
  }
  result.elements_ = result.offsets_.back();
  return result;
}

Blocks Blocks::in_parts(const Blocks& shares, std::int64_t parts) {
  if (parts == 1) return shares;
  std::vector<std::int64_t> lengths;
  for (std::int64_t share = 0; share < shares.count(); ++share)
    for (std::int64_t part = 0; part < parts; ++part)
      lengths.push_back(split(shares.at(share).length, parts, part).length);
  return counted(lengths);
}

Blocks Blocks::copies(const Blocks& original, std::int64_t copies) {
  Blocks result = original;
  result.copies_ = copies;
  return result;
}

Range Blocks::at_copy(std::int64_t block) const {
  const std::int64_t copy = block / blocks_;
  const std::int64_t within = block % blocks_;
  Range range;
  if (offsets_.empty()) {
    range = part_of(within);
  } else {
    const auto index = static_cast<std::size_t>(within);
    range = {offsets_[index], offsets_[index + 1] - offsets_[index]};
  }
  range.offset += copy * elements_;
  return range;
}

Blocks scratch_blocks(const ScratchLayout& scratch, const AllBlocks& blocks) {
  const Blocks& like = blocks[static_cast<std::size_t>(scratch.like)];
  return Blocks::copies(scratch.block < 0 ? like : Blocks::even(like.at(scratch.block).length, 1), scratch.copies);
}

}  // namespace unisono
