// The last calls of this rank, for error messages: what was called, where, and how far it went.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <string>

#include "scheduling.h"

namespace unisono {

// Where a call stands in the user's program. The name must live as long as the record of the call.
struct CallSite {
  const char* file = nullptr;
  int line = 0;
};

struct CallRecord {
  std::uint64_t communicator = 0;
  std::uint64_t sequence = 0;
  std::uint64_t digest = 0;
  std::shared_ptr<const std::string> description;
  CallSite site;
  std::string where;  // which communicator it was made on, if not the world
  bool returned = false;

  // "allreduce(float32[8], op=sum) in ranks 2 and 3 at train.py:12"
  std::string text() const;
};

// Point-to-point calls are recorded apart from the collectives of their communicator.
inline constexpr std::uint64_t point_to_point_record = std::uint64_t{1} << 63;

class Recorder {
 public:
  static constexpr std::size_t capacity = 64;

  // Gives a communicator a name, such as " in ranks 2 and 3", for the texts of its calls.
  void name(std::uint64_t communicator, std::string where);
  // Says that a communicator is closed. Its name stays for its last calls, until `capacity` others are closed.
  void close(std::uint64_t communicator);
  // Notes a call and returns the index of its record, which stays valid for `capacity` further calls.
  std::size_t begin(std::uint64_t communicator, std::uint64_t sequence, std::uint64_t digest,
                    const std::shared_ptr<const std::string>& description, const CallSite& site);
  void set_site(std::size_t index, const CallSite& site);
  void end(std::size_t index) { returned_[index].store(true, std::memory_order_relaxed); }

  std::optional<CallRecord> find(std::uint64_t communicator, std::uint64_t sequence) const;
  std::optional<CallRecord> last(std::uint64_t communicator) const;
  // The latest call, of any communicator, that has not returned.
  std::optional<CallRecord> running() const;

 private:
  CallRecord record(std::size_t index) const;

  mutable BriefLock lock_;
  std::array<CallRecord, capacity> records_;
  std::array<std::atomic<bool>, capacity> returned_{};  // apart from the records, because it needs no lock
  std::uint64_t begun_ = 0;
  std::map<std::uint64_t, std::string> names_;  // of communicators
  std::deque<std::uint64_t> closed_;            // of those, in the order in which they were closed
};

}  // namespace unisono
