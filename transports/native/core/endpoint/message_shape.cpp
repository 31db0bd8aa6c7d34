#include "endpoint/message_shape.h"

#include <algorithm>
#include <cstddef>

namespace unisono {
namespace {

// The shape code (message_shape.h) holds the lengths of all axes but the last, in this many bits each. The length of
// the last axis follows from the number of elements.
constexpr unsigned bits_of_axis = 21;
constexpr unsigned most_axes = 3;
constexpr std::uint64_t most_length = (std::uint64_t{1} << bits_of_axis) - 1;
// This bit is set in a shape code that is a hash, because the shape has more axes or longer ones than fit.
constexpr std::uint64_t is_hash = std::uint64_t{1} << 63U;
constexpr std::uint64_t hash_factor = 0x9e3779b97f4a7c15;

}  // namespace

std::uint64_t shape_code(std::span<const std::int64_t> shape) {
  std::uint64_t code = 0;
  std::uint64_t hash = 0;
  std::uint64_t previous = 1;  // the length of the last axis so far that counts
  unsigned axes = 0;           // those before it
  bool fits = true;
  for (const std::int64_t length : shape) {
    if (length == 0) return 0;
    if (length == 1) continue;
    if (previous != 1) {
      fits = fits && axes < most_axes && previous <= most_length;
      if (fits) code |= previous << (bits_of_axis * axes);
      hash = (hash ^ previous) * hash_factor;
      hash ^= hash >> 32U;
      ++axes;
    }
    previous = static_cast<std::uint64_t>(length);
  }
  return fits ? code : hash | is_hash;
}

std::string shape_text(std::uint64_t code, std::uint64_t count) {
  if ((code & is_hash) != 0) return "[" + std::to_string(count) + " of several axes]";
  std::string text = "[";
  for (; code != 0; code >>= bits_of_axis) {
    const std::uint64_t length = code & most_length;
    text += std::to_string(length) + ",";
    count /= std::max<std::uint64_t>(length, 1);
  }
  return text + std::to_string(count) + "]";
}

}  // namespace unisono
