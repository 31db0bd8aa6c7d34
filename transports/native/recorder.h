// The last calls of this rank, for error messages: what was called, where, and how far it went.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>

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
  bool returned = false;

  // "allreduce(float32[8], op=sum) at train.py:12"
  std::string text() const;
};

class Recorder {
 public:
  static constexpr std::size_t capacity = 64;

  // Notes a call and returns the index of its record, which stays valid for `capacity` further calls.
  std::size_t begin(std::uint64_t communicator, std::uint64_t sequence, std::uint64_t digest,
                    const std::shared_ptr<const std::string>& description, const CallSite& site);
  void set_site(std::size_t index, const CallSite& site);
  void end(std::size_t index) { returned_[index].store(true, std::memory_order_relaxed); }

  std::optional<CallRecord> find(std::uint64_t communicator, std::uint64_t sequence) const;
  std::optional<CallRecord> last(std::uint64_t communicator) const;

 private:
  CallRecord record(std::size_t index) const;

  mutable std::mutex mutex_;
  std::array<CallRecord, capacity> records_;
  std::array<std::atomic<bool>, capacity> returned_{};  // apart from the records, because it needs no lock
  std::uint64_t begun_ = 0;
};

}  // namespace unisono
