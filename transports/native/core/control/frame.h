//! Frames, the messages on control links: a fixed part, a text and a list of ranks.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "control/failure.h"

namespace unisono {

//! The kind of frame, with its direction.
enum class FrameType : std::uint8_t {
  failure = 1,   // both ways: a failure; the judges pass the first one on to every rank
  blocked = 2,   // to a judge: I am in this call and have made no progress for a while
  mismatch = 3,  // to a judge: I received a message of another call
  late = 4,      // to a judge: this call or message will time out in `time_left_us`
  query = 5,     // from a judge: what do you know of this call, or, for sequence -1, in which call are you?
  answer = 6,    // to the judge that has asked
  leaving = 7,  // to a judge: I depart; from a judge: this rank has departed; `number`: channels it had with the reader
  outlook = 8,  // from a judge: why your late call does not end
  closing = 9,  // to a judge: I close this communicator, and this was my last call on it
  settled = 10,  // from a judge: every other rank has made that call too, or has departed
  clock = 11,    // to rank 0: what does your clock say? `number` is the time by mine, in nanoseconds
  time = 12,     // from rank 0, with the same `number`: the time by its clock is `sequence`
};

//! The knowledge of a rank about a call. `forgotten`: it made the call so long ago that its history has dropped it.
//! `outside`: it is not in the communicator; only judges use this value, and no rank sends it.
enum class CallState : std::uint8_t { unknown, not_called, running, returned, departed, forgotten, outside };

//! One frame. Each type uses some of the fields.
struct Frame {
  FrameType type = FrameType::failure;
  FailureKind failure = FailureKind::none;
  CallState state = CallState::unknown;
  std::int32_t rank = -1;
  std::int32_t peer = -1;       // of a query and its answer: the round of questions
  std::int32_t waits_for = -1;  // the rank whose message the sender of this frame waits for
  std::uint64_t communicator = 0;
  std::int64_t sequence = -1;
  std::int64_t number = -1;  // of a late call or message, in the numbering of its rank
  std::uint64_t digest = 0;
  std::uint64_t time_left_us = 0;
  std::string text;
  std::vector<std::int32_t> members;  // of a report: the ranks of the communicator; empty for all
                                      // of a farewell to a judge: the number of channels with each rank
};

//! Returns the bytes of a frame, with a text that is too long cut.
std::string encode(const Frame& frame);

//! Moves the first complete frame from `bytes` into `frame`; false if there is none yet. Bytes of the text that are no
//! UTF-8 are replaced. Throws std::runtime_error if the bytes cannot be a frame.
bool decode(std::string& bytes, Frame& frame);

}  // namespace unisono
