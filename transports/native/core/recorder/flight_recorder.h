//! The flight recorder: which calls this rank made, where in the program, when, and how they ended. Error messages
//! quote from it, and other processes can read it (flight_memory.h).
//!
//! The last calls and messages are kept one by one, 1,000 by default. Older collectives are kept as a compact history.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "recorder/flight_memory.h"
#include "recorder/group_log.h"
#include "recorder/record_clock.h"
#include "system/scheduling.h"

namespace unisono {

//! The file and line of a call in the user's program. `file` must live as long as the record of the call.
struct CallSite {
  const char* file = nullptr;
  int line = 0;
};

//! The facts about a call that errors and readers of the recorder show, apart from its place in the program.
struct Description {
  std::string text;                 // as the user wrote the call: "allreduce(float32[8], op=sum)"
  std::string facts;                // a JSON object: the collective, the algorithm, ...
  std::uint64_t nbytes = 0;         // of its arrays on this rank
  std::int32_t dtype = -1;          // of a message: the number of its dtype
  mutable std::uint64_t place = 0;  // in the memory of the recorder, which alone uses it
};
using SharedDescription = std::shared_ptr<const Description>;

//! One recorded call or message.
struct CallRecord {
  std::uint64_t communicator = 0;
  std::uint64_t sequence = 0;
  std::uint64_t digest = 0;
  SharedDescription description;
  CallSite site;
  std::int32_t peer = -1;  // of a message: the other rank, in the job
  std::string where;       // " in ranks 2 and 3": the communicator, if it is not the world
  bool returned = false;

  //! The call as errors show it, such as "allreduce(float32[8], op=sum) in ranks 2 and 3 at train.py:12".
  std::string text() const;
};

//! This bit of a communicator's id marks the records of its messages, which are numbered apart from its collectives.
inline constexpr std::uint64_t point_to_point_record = std::uint64_t{1} << 63;

//! All collectives of this rank, back to the last 65,536 runs. A judge asks about old collectives when ranks make
//! different calls and one of them has run ahead.
//!
//! A run is a number of consecutive calls with one signature. A program that repeats a broadcast a million times has
//! one run. A program that alternates between two signatures has one run for each call.
class CallHistory {
 public:
  //! A call, as `find` and `last` return it.
  struct Entry {
    std::uint64_t digest;
    std::uint64_t sequence;
    SharedDescription description;
    CallSite site;  // of the first call with this signature
  };

  //! Records a call. The inline part extends the last run.
  void add(std::uint64_t communicator, std::uint64_t sequence, std::uint64_t digest,
           const SharedDescription& description, const CallSite& site) {
    if (!runs_.empty()) {
      Run& run = runs_[newest_];
      if (run.signature->digest == digest && run.signature->communicator == communicator &&
          run.first + run.count == sequence) {
        ++run.count;
        return;
      }
    }
    begin_run(communicator, sequence, digest, description, site);
  }
  //! Returns the call with this number; empty if the history has dropped it.
  std::optional<Entry> find(std::uint64_t communicator, std::uint64_t sequence) const;
  //! Returns the last call on a communicator; empty if there was none.
  std::optional<Entry> last(std::uint64_t communicator) const;

 private:
  static constexpr std::size_t most_runs = 1 << 16;
  static constexpr std::size_t most_signatures = 1 << 12;
  // The facts that are equal for all calls with one digest on one communicator, and the place of the first such call.
  struct Signature {
    std::uint64_t communicator;
    std::uint64_t digest;
    SharedDescription description;
    CallSite site;
  };
  struct Run {
    const Signature* signature;
    std::uint32_t first;
    std::uint32_t count;
  };

  void begin_run(std::uint64_t communicator, std::uint64_t sequence, std::uint64_t digest,
                 const SharedDescription& description, const CallSite& site);

  // Returns the newest run for which `condition` holds.
  template <class Condition>
  const Run* newest_run(Condition condition) const {
    for (std::size_t back = 0; back < runs_.size(); ++back) {
      const Run& run = runs_[(newest_ + runs_.size() - back) % runs_.size()];
      if (condition(run)) return &run;
    }
    return nullptr;
  }

  std::map<std::pair<std::uint64_t, std::uint64_t>, Signature> signatures_;  // by communicator and digest
  std::vector<Run> runs_;                                                    // a ring once it is full
  std::size_t newest_ = 0;
};

//! The flight recorder of a process. Any thread may call it.
class FlightRecorder {
 public:
  //! `rank` and `size` are those of the job; `depth` is the number of calls to keep, and 0 keeps others from seeing
  //! them.
  explicit FlightRecorder(std::int32_t rank = 0, std::int32_t size = 1, std::size_t depth = 0)
      : memory_(rank, size, depth), kept_(memory_.depth()) {}

  //! Lets endpoints that are made from now on record the groups of their plans.
  void record_groups() { groups_ = std::make_unique<GroupLog>(); }
  //! The groups, or nullptr if they are not recorded.
  GroupLog* groups() const { return groups_.get(); }
  //! The memory, which other processes can read.
  FlightMemory& memory() { return memory_; }

  //! Names a communicator, such as " in ranks 2 and 3", for the texts of its calls.
  void name(std::uint64_t communicator, std::string where);
  //! Marks a communicator as closed. Its name is kept for the texts of its last calls, until 64 others are closed.
  void close(std::uint64_t communicator);
  //! Records a collective and returns the index of its record, which is valid until `depth` further calls.
  std::size_t begin(std::uint64_t communicator, std::uint64_t sequence, std::uint64_t digest,
                    const SharedDescription& description, const CallSite& site, std::int64_t called_ns = 0);
  //! Records a message to or from `peer`, a rank of the job; -1 for any rank.
  std::size_t begin_message(std::uint64_t communicator, std::uint64_t number, std::int32_t peer,
                            const SharedDescription& description, const CallSite& site, std::uint64_t nbytes = 0,
                            std::int64_t called_ns = 0);
  //! Replaces the call site of a recorded call, for a caller that learns it only after the call has been recorded.
  void set_site(std::size_t index, const CallSite& site);
  //! Notes that the first message of a call has passed.
  void move(std::size_t index) {
    FlightRecord& record = memory_.record(index);
    record.moved_ns.store(std::max(now_ns(), record.begun_ns), std::memory_order_relaxed);
  }
  //! Notes the rank of the job that a call waits for.
  void wait(std::size_t index, std::int32_t peer) {
    memory_.record(index).waits_for.store(peer, std::memory_order_relaxed);
  }
  //! Marks a message as one that the program awaits at all times, as a server awaits requests. So it is not the call
  //! that the rank is in. Does nothing if a newer call has replaced the record.
  void listen(std::size_t index, std::uint64_t communicator, std::uint64_t number);
  //! Marks a call as returned.
  void end(std::size_t index, RecordState state = RecordState::done) {
    FlightRecord& record = memory_.record(index);
    const std::int64_t after = std::max(record.begun_ns, record.moved_ns.load(std::memory_order_relaxed));
    record.ended_ns.store(std::max(now_ns(), after), std::memory_order_relaxed);
    record.state.store(state, std::memory_order_release);
  }
  //! The time as records have it; 0 if nobody reads them.
  std::int64_t now_ns() const { return memory_.is_published() ? RecordClock::now_ns() : 0; }

  //! Returns the collective with this number, from the history if newer calls have replaced its record.
  std::optional<CallRecord> find(std::uint64_t communicator, std::uint64_t sequence) const;
  //! The latest collective on a communicator.
  std::optional<CallRecord> last(std::uint64_t communicator) const;
  //! The latest call or message on any communicator that has not returned, without those that the program awaits at
  //! all times.
  std::optional<CallRecord> running() const;
  //! The latest call or message on any communicator.
  std::optional<CallRecord> latest() const;
  //! The last calls and messages that have ended without an error, at most this many, the newest first.
  std::vector<CallRecord> last_ended(std::size_t most) const;

 private:
  static constexpr std::size_t most_closed = 64;
  // The parts of a record that are not in the shared memory, because only this process can use them.
  struct Kept {
    SharedDescription description;
    CallSite site;
    bool listens = false;
  };

  std::size_t write(std::uint64_t communicator, std::uint64_t sequence, std::uint64_t digest, std::int32_t peer,
                    std::uint64_t nbytes, const SharedDescription& description, const CallSite& site,
                    std::int64_t called_ns);
  void prefetch(std::size_t index) const;
  std::uint64_t place_of(const Description& description);
  std::uint64_t place_of(const char* file);
  bool is_of(std::size_t index, std::uint64_t communicator, std::uint64_t sequence) const;
  CallRecord record(std::size_t index) const;
  CallRecord record(std::uint64_t communicator, const CallHistory::Entry& entry) const;
  std::string name_of(std::uint64_t communicator) const;

  // Guards the members below except `groups_`. Some times and the state of a record are atomic, so that a call can note
  // them without the lock.
  mutable BriefLock lock_;
  FlightMemory memory_;
  std::unique_ptr<GroupLog> groups_;
  std::vector<Kept> kept_;  // by index of the record
  std::uint64_t begun_ = 0;
  std::size_t next_ = 0;  // the index of the next record: `begun_` modulo their number
  CallHistory history_;
  std::unordered_map<const char*, std::uint64_t> files_;  // places of their names in the memory
  std::map<std::uint64_t, std::string> names_;            // by communicator
  std::deque<std::uint64_t> closed_;                      // closed communicators, in the order of closing
};

}  // namespace unisono
