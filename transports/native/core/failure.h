// Why a communicator can no longer be used.
#pragma once

#include <cstdint>
#include <string>

namespace unisono {

enum class FailureKind : std::uint8_t { none, mismatch, peer_lost, timeout, aborted, internal, unavailable };

struct Failure {
  FailureKind kind = FailureKind::none;
  std::int32_t rank = -1;      // that found it
  std::int32_t peer = -1;      // that it is about
  std::int64_t sequence = -1;  // of the call
  std::string text;
};

}  // namespace unisono
