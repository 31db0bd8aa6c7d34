// The calls of this rank, for error messages: what was called, where in the program, and whether it has returned. The
// last 64 calls and messages are recorded one by one; of collectives before them a history is kept.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

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
  std::int32_t peer = -1;  // of a message: the other rank, in the job
  std::string where;       // which communicator it was made on, if not the world
  bool returned = false;

  // "allreduce(float32[8], op=sum) in ranks 2 and 3 at train.py:12"
  std::string text() const;
};

// Messages are counted apart from the collectives of their communicator: this bit of its id tells them apart.
inline constexpr std::uint64_t point_to_point_record = std::uint64_t{1} << 63;

// Every collective of this rank, for as long back as 65,536 runs reach: what ranks that have run ahead are asked for.
//
// A run is a number of consecutive calls of one kind: a program that repeats a broadcast a million times has one run. A
// program that alternates between two kinds has a run for each call.
class CallHistory {
 public:
  struct Entry {
    std::uint64_t digest;
    std::uint64_t sequence;
    std::shared_ptr<const std::string> description;
    CallSite site;  // of the first call of its kind
  };

  void add(std::uint64_t communicator, std::uint64_t sequence, std::uint64_t digest,
           const std::shared_ptr<const std::string>& description, const CallSite& site) {
    if (!runs_.empty()) {
      Run& run = runs_[newest_];
      if (run.kind->digest == digest && run.kind->communicator == communicator && run.first + run.count == sequence) {
        ++run.count;
        return;
      }
    }
    begin_run(communicator, sequence, digest, description, site);
  }
  std::optional<Entry> find(std::uint64_t communicator, std::uint64_t sequence) const;
  std::optional<Entry> last(std::uint64_t communicator) const;

 private:
  static constexpr std::size_t most_runs = 1 << 16;
  static constexpr std::size_t most_kinds = 1 << 12;
  struct Kind {
    std::uint64_t communicator;
    std::uint64_t digest;
    std::shared_ptr<const std::string> description;
    CallSite site;
  };
  struct Run {
    const Kind* kind;
    std::uint32_t first;
    std::uint32_t count;
  };

  void begin_run(std::uint64_t communicator, std::uint64_t sequence, std::uint64_t digest,
                 const std::shared_ptr<const std::string>& description, const CallSite& site);

  // The newest run for which `condition` holds.
  template <class Condition>
  const Run* newest_run(Condition condition) const {
    for (std::size_t back = 0; back < runs_.size(); ++back) {
      const Run& run = runs_[(newest_ + runs_.size() - back) % runs_.size()];
      if (condition(run)) return &run;
    }
    return nullptr;
  }

  std::map<std::pair<std::uint64_t, std::uint64_t>, Kind> kinds_;  // by communicator and digest
  std::vector<Run> runs_;                                          // a ring, once it is full
  std::size_t newest_ = 0;
};

class Recorder {
 public:
  static constexpr std::size_t capacity = 64;

  // Gives a communicator a name, such as " in ranks 2 and 3", for the texts of its calls.
  void name(std::uint64_t communicator, std::string where);
  // Says that a communicator is closed. Its name stays for its last calls, until `capacity` others are closed.
  void close(std::uint64_t communicator);
  // Records a collective and returns the index of its record, which stays valid for `capacity` further calls.
  std::size_t begin(std::uint64_t communicator, std::uint64_t sequence, std::uint64_t digest,
                    const std::shared_ptr<const std::string>& description, const CallSite& site);
  // The same for a message to or from `peer`, a rank of the job; -1 for any.
  std::size_t begin_message(std::uint64_t communicator, std::uint64_t number, std::int32_t peer,
                            const std::shared_ptr<const std::string>& description, const CallSite& site);
  void set_site(std::size_t index, const CallSite& site);
  void end(std::size_t index) { returned_[index].store(true, std::memory_order_relaxed); }

  // A collective by its number, and the latest one; of calls that are no longer recorded, what the history knows.
  std::optional<CallRecord> find(std::uint64_t communicator, std::uint64_t sequence) const;
  std::optional<CallRecord> last(std::uint64_t communicator) const;
  // The latest call or message, of any communicator, that has not returned.
  std::optional<CallRecord> running() const;
  // The latest call or message, of any communicator.
  std::optional<CallRecord> latest() const;

 private:
  std::size_t write(std::uint64_t communicator, std::uint64_t sequence, std::uint64_t digest,
                    const std::shared_ptr<const std::string>& description, const CallSite& site);
  CallRecord record(std::size_t index) const;
  CallRecord record(std::uint64_t communicator, const CallHistory::Entry& entry) const;
  std::string name_of(std::uint64_t communicator) const;

  mutable BriefLock lock_;
  std::array<CallRecord, capacity> records_;
  std::array<std::atomic<bool>, capacity> returned_{};  // apart from the records, because it needs no lock
  std::uint64_t begun_ = 0;
  CallHistory history_;
  std::map<std::uint64_t, std::string> names_;  // of communicators
  std::deque<std::uint64_t> closed_;            // of those, in the order in which they were closed
};

}  // namespace unisono
