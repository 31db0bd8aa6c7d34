//! The times of the groups of plans that a process has run, for traces.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <vector>

namespace unisono {

//! A group of a plan, for one segment. Times are nanoseconds of CLOCK_MONOTONIC.
struct GroupRecord {
  std::uint64_t communicator;
  std::uint64_t sequence;  // of the call
  std::int64_t lane;
  std::int64_t group;
  std::int64_t segment;
  std::int64_t begun_ns;
  std::int64_t ended_ns;
};

//! The last groups that have ended. Any thread may call it.
class GroupLog {
 public:
  static constexpr std::size_t most_records = 100'000;

  //! The time as records have it.
  static std::int64_t now_ns() {
    return std::chrono::nanoseconds(std::chrono::steady_clock::now().time_since_epoch()).count();
  }
  //! Adds a group, in place of the oldest one if the log is full.
  void add(const GroupRecord& record) {
    const std::lock_guard lock(mutex_);
    if (records_.size() < most_records)
      records_.push_back(record);
    else
      records_[added_ % most_records] = record;
    ++added_;
  }
  //! Returns all groups in the log, in no particular order.
  std::vector<GroupRecord> records() const {
    const std::lock_guard lock(mutex_);
    return records_;
  }

 private:
  mutable std::mutex mutex_;  // guards the records, which leaders of several endpoints add
  std::vector<GroupRecord> records_;
  std::size_t added_ = 0;
};

}  // namespace unisono
