//! `Diagnosis`: the reports of all ranks about one call, and the failure that follows from them. It uses no links and
//! no clock.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "control/failure.h"
#include "control/frame.h"

namespace unisono {

//! One rank's report about the call.
struct RankReport {
  CallState state = CallState::unknown;
  std::uint64_t digest = 0;
  std::string text;  // the call; or where in the program the rank is, if it has not made the call
  std::int32_t waits_for = -1;
  std::int32_t unanswered = 0;  // questions since its last answer

  //! Whether the rank counts as one that does not answer: it has never answered, or it owes answers to more than three
  //! questions. Fewer missing answers only mean that the rank is slow.
  bool is_silent() const { return state == CallState::unknown || unanswered > 3; }
  //! Whether the rank has not made the call because it is in another one, as `Control::answer_query` says.
  bool is_in_another_call() const { return state == CallState::not_called && text.starts_with("it is in "); }
};

//! The reason why the call of one rank does not end, for the error of that rank.
struct Outlook {
  std::int32_t peer = -1;  // the rank that the others wait for
  std::string text;        // continues "rank 3 waited 2 s"
};

//! A question of a judge, why one call does not end, and the reports about it.
//!
//! Example: ranks 0 and 1 call allreduce(float32[8]) as call #5, and rank 2 calls barrier(). The reports have two
//! digests, so `disagreement` names rank 2. If rank 2 has made only four calls, there is no disagreement. The outlook
//! of rank 0 is then " in call #5 allreduce(float32[8]): rank 2 has not called it (last: ...)".
struct Diagnosis {
  std::uint64_t communicator = 0;
  std::int64_t sequence = -1;  // of the collective; -1: the question is where the ranks are
  std::vector<RankReport> ranks;
  //! The rank that received a message of another call, and the text of that error; -1 if no rank has.
  std::int32_t mismatch_reporter = -1;
  std::string mismatch;

  //! Whether every rank that was asked has answered the latest question.
  bool is_complete() const;
  //! Whether every rank that has not departed has made the call.
  bool all_have_called() const;
  //! Returns the failure that follows from the reports: different calls, or else the reported mismatch. Empty if none
  //! follows. The majority decides which call is right. So unless `final`, the result is empty as long as a rank has
  //! not answered, or has not made the call and may still decide.
  std::optional<Failure> verdict(bool final) const;
  //! Returns the reason why the collective `sequence` does not end, in the words for `rank`. If `sequence` is -1,
  //! returns the reason why no message passes between `rank` and the rank `waits_for`.
  Outlook outlook(std::int32_t rank, std::int32_t waits_for) const;

 private:
  std::optional<Failure> disagreement() const;
  Outlook outlook_of_call() const;
  Outlook outlook_of_message(std::int32_t rank, std::int32_t waits_for) const;
};

//! "rank 3", "ranks 0, 2 and 5" or "ranks 0-14", for error texts.
std::string ranks_text(const std::vector<std::int32_t>& ranks);

}  // namespace unisono
