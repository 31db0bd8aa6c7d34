// Fuzzing: each fuzz_*.cpp defines one target for bytes that a peer or a caller chose. With clang, libFuzzer drives it;
// with other compilers driver.cpp does, by the seeds and random changes of them. A target ends the program when what it
// drives breaks its contract; sanitizers end it when it breaks memory.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>

#include "check.h"

// libFuzzer's interface. Returns 0.
extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t nbytes);

namespace unisono::testing {

// Takes numbers from the front of the input, and zeros after its end.
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
