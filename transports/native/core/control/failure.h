//! A failure: the reason why a communicator can no longer be used.
#pragma once

#include <cstdint>
#include <string>

namespace unisono {

//! The kind of failure, which decides the class of the Python error.
enum class FailureKind : std::uint8_t {
  none,
  mismatch,
  peer_lost,
  timeout,
  aborted,
  internal,
  unavailable,
  corruption
};

//! The first failure of a job, as all its ranks raise it.
struct Failure {
  FailureKind kind = FailureKind::none;
  std::int32_t rank = -1;      // the rank that found it
  std::int32_t peer = -1;      // the rank that caused it, if known
  std::int64_t sequence = -1;  // of the call, if any
  std::string text;
};

}  // namespace unisono
