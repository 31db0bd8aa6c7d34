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

// Reads numbers from the front of the input. After the end of the input, all numbers are 0.
class Input {
 public:
  Input(const std::uint8_t* data, std::size_t nbytes) : remaining_(data, nbytes) {}

  bool empty() const { return remaining_.empty(); }
  template <class T>
  T take() {
    T value{};
    const auto part = bytes(sizeof value);
    if (!part.empty()) std::memcpy(&value, part.data(), part.size());
    return value;
  }
  std::span<const std::uint8_t> bytes(std::size_t most) {
    const auto part = remaining_.first(most < remaining_.size() ? most : remaining_.size());
    remaining_ = remaining_.subspan(part.size());
    return part;
  }

 private:
  std::span<const std::uint8_t> remaining_;
};

}  // namespace unisono::testing
