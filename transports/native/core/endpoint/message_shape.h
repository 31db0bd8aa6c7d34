// The shape of the array of a message, as the header carries it: see `shape_code`.
#pragma once

#include <cstdint>
#include <span>
#include <string>

namespace unisono {

//! Returns a number for the shape of an array. Axes of length 1 do not count. It is 0 for an array with at most one
//! other axis, or without elements: such an array is flat. Up to four axes can be read from the number again.
std::uint64_t shape_code(std::span<const std::int64_t> shape);

//! Whether a message of one shape may be received into an array of the other, with as many elements: they are equal, or
//! one is flat.
inline bool shapes_fit(std::uint64_t one, std::uint64_t other) { return one == other || one == 0 || other == 0; }

//! Returns the shape of `count` elements as errors show it, such as "[6,4]", or "[24 of several axes]" if the
//! number is a hash.
std::string shape_text(std::uint64_t code, std::uint64_t count);

}  // namespace unisono
