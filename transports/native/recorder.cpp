#include "recorder.h"

#include <algorithm>
#include <mutex>
#include <utility>

namespace unisono {

std::string CallRecord::text() const {
  std::string shown = description ? *description : "?";
  shown += where;
  if (site.file != nullptr) shown += std::string(" at ") + site.file + ":" + std::to_string(site.line);
  return shown;
}

void Recorder::name(std::uint64_t communicator, std::string where) {
  const std::lock_guard held(lock_);
  names_.insert_or_assign(communicator, std::move(where));
}

void Recorder::close(std::uint64_t communicator) {
  const std::lock_guard held(lock_);
  if (!names_.contains(communicator)) return;
  closed_.push_back(communicator);
  if (closed_.size() <= capacity) return;
  names_.erase(closed_.front());
  closed_.pop_front();
}

std::size_t Recorder::begin(std::uint64_t communicator, std::uint64_t sequence, std::uint64_t digest,
                            const std::shared_ptr<const std::string>& description, const CallSite& site) {
  const std::lock_guard held(lock_);
  const std::size_t index = begun_++ % capacity;
  CallRecord& record = records_[index];
  record.communicator = communicator;
  record.sequence = sequence;
  record.digest = digest;
  // A program that repeats a call finds its description here, and leaves the count of its owners alone.
  if (record.description != description) record.description = description;
  record.site = site;
  returned_[index].store(false, std::memory_order_relaxed);
  return index;
}

void Recorder::set_site(std::size_t index, const CallSite& site) {
  const std::lock_guard held(lock_);
  records_[index].site = site;
}

CallRecord Recorder::record(std::size_t index) const {
  CallRecord record = records_[index];
  record.returned = returned_[index].load(std::memory_order_relaxed);
  const auto named = names_.find(record.communicator & ~point_to_point_record);
  if (named != names_.end()) record.where = named->second;
  return record;
}

std::optional<CallRecord> Recorder::find(std::uint64_t communicator, std::uint64_t sequence) const {
  const std::lock_guard held(lock_);
  for (std::size_t index = 0; index < capacity; ++index) {
    const CallRecord& found = records_[index];
    if (found.description && found.communicator == communicator && found.sequence == sequence) return record(index);
  }
  return std::nullopt;
}

std::optional<CallRecord> Recorder::last(std::uint64_t communicator) const {
  const std::lock_guard held(lock_);
  std::optional<std::size_t> latest;
  for (std::size_t index = 0; index < capacity; ++index) {
    const CallRecord& found = records_[index];
    if (!found.description || found.communicator != communicator) continue;
    if (!latest || records_[*latest].sequence < found.sequence) latest = index;
  }
  return latest ? std::optional(record(*latest)) : std::nullopt;
}

std::optional<CallRecord> Recorder::running() const {
  const std::lock_guard held(lock_);
  for (std::uint64_t back = 1; back <= std::min<std::uint64_t>(begun_, capacity); ++back) {
    const std::size_t index = (begun_ - back) % capacity;
    if (!returned_[index].load(std::memory_order_relaxed)) return record(index);
  }
  return std::nullopt;
}

}  // namespace unisono
