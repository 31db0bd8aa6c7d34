// Fuzzing. Each fuzz_*.cpp defines one target for bytes that a peer or a caller chooses. libFuzzer drives it with
// clang. With other compilers driver.cpp does, with the seeds and random changes of them. A target ends the program
// when the tested code breaks its contract, and sanitizers end it on memory errors.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>

#include "check.h"

// libFuzzer's interface. Returns 0.
extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t nbytes);

namespace unisono::testing {

// Reads numbers from the front of the input, and zeros after its end.
class Input {
 public:
  Input(const std::uint8_t* data, std::size_t nbytes) : left_(data, nbytes) {}

  bool empty() const { return left_.empty(); }
  template <class T>
  T take() {
    T value{};
    const auto part = bytes(sizeof value);
    if (!part.empty()) std::memcpy(&value, part.data(), part.size());
    return value;
  }
  std::span<const std::uint8_t> bytes(std::size_t most) {
    const auto part = left_.first(most < left_.size() ? most : left_.size());
    left_ = left_.subspan(part.size());
    return part;
  }

 private:
  std::span<const std::uint8_t> left_;
};

}  // namespace unisono::testing
