// Shared by the native tests: conditions, a deadline for the whole program, and a list of tests to run.
#pragma once

#include <unistd.h>

#include <cstdio>
#include <exception>
#include <initializer_list>
#include <random>
#include <stdexcept>
#include <string>

#define CHECK(condition)                                                                                              \
  do {                                                                                                                \
    if (!(condition)) throw std::logic_error(std::string(__FILE__ ":") + std::to_string(__LINE__) + ": " #condition); \
  } while (false)

namespace unisono::testing {

// SIGALRM kills a program whose tests run for longer.
inline constexpr unsigned deadline_s = 300;

struct Test {
  const char* name;
  void (*body)();
};

inline int run_tests(std::initializer_list<Test> tests) {
  ::alarm(deadline_s);
  int failures = 0;
  for (const Test& test : tests) {
    std::printf("%s\n", test.name);
    std::fflush(stdout);
    try {
      test.body();
    } catch (const std::exception& error) {
      std::printf("  FAILED: %s\n", error.what());
      ++failures;
    }
  }
  return failures == 0 ? 0 : 1;
}

template <class Error>
bool throws(auto&& body) {
  try {
    body();
  } catch (const Error&) {
    return true;
  }
  return false;
}

// Random numbers that are the same in each run.
class Dice {
 public:
  explicit Dice(std::uint64_t seed) : engine_(seed) {}
  std::size_t below(std::size_t limit) { return static_cast<std::size_t>(engine_() % limit); }
  std::uint64_t word() { return engine_(); }
  // Returns a number that often breaks bounds: a small one, one near a power of two or the maximum, or any other.
  std::uint64_t awkward() {
    const std::uint64_t near_power = (std::uint64_t{1} << below(64)) + below(3) - 1;
    const std::uint64_t choices[] = {below(4), near_power, ~std::uint64_t{0} - below(4), word()};
    return choices[below(4)];
  }

 private:
  std::mt19937_64 engine_;
};

}  // namespace unisono::testing
