#include "flight_recorder.h"

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

void FlightRecorder::name(std::uint64_t communicator, std::string where) {
  const std::lock_guard held(lock_);
  names_.insert_or_assign(communicator, std::move(where));
}

void FlightRecorder::close(std::uint64_t communicator) {
  const std::lock_guard held(lock_);
  if (!names_.contains(communicator)) return;
  closed_.push_back(communicator);
  if (closed_.size() <= capacity) return;
  names_.erase(closed_.front());
  closed_.pop_front();
}

void CallHistory::begin_run(std::uint64_t communicator, std::uint64_t sequence, std::uint64_t digest,
                            const std::shared_ptr<const std::string>& description, const CallSite& site) {
  // every call has a new signature; runs point to signatures, so both are dropped
  if (signatures_.size() >= most_signatures) {
    runs_.clear();
    newest_ = 0;
    signatures_.clear();
  }
  const Signature& signature =
      signatures_.try_emplace({communicator, digest}, Signature{communicator, digest, description, site}).first->second;
  const Run run{&signature, static_cast<std::uint32_t>(sequence), 1};
  if (runs_.size() < most_runs) {
    newest_ = runs_.size();
    runs_.push_back(run);
  } else {
    newest_ = (newest_ + 1) % most_runs;
    runs_[newest_] = run;
  }
}

std::optional<CallHistory::Entry> CallHistory::find(std::uint64_t communicator, std::uint64_t sequence) const {
  const Run* run = newest_run([=](const Run& candidate) {
    return candidate.signature->communicator == communicator && candidate.first <= sequence &&
           sequence - candidate.first < candidate.count;
  });
  if (run == nullptr) return std::nullopt;
  return Entry{run->signature->digest, sequence, run->signature->description, run->signature->site};
}

std::optional<CallHistory::Entry> CallHistory::last(std::uint64_t communicator) const {
  const Run* run = newest_run([=](const Run& candidate) { return candidate.signature->communicator == communicator; });
  if (run == nullptr) return std::nullopt;
  return Entry{run->signature->digest, run->first + run->count - 1, run->signature->description, run->signature->site};
}

std::size_t FlightRecorder::write(std::uint64_t communicator, std::uint64_t sequence, std::uint64_t digest,
                                  const std::shared_ptr<const std::string>& description, const CallSite& site) {
  const std::size_t index = begun_++ % capacity;
  CallRecord& record = records_[index];
  record.communicator = communicator;
  record.sequence = sequence;
  record.digest = digest;
  // A program that repeats a call finds its description here and does not touch its reference count.
  if (record.description != description) record.description = description;
  record.site = site;
  returned_[index].store(false, std::memory_order_relaxed);
  return index;
}

std::size_t FlightRecorder::begin(std::uint64_t communicator, std::uint64_t sequence, std::uint64_t digest,
                                  const std::shared_ptr<const std::string>& description, const CallSite& site) {
  const std::lock_guard held(lock_);
  history_.add(communicator, sequence, digest, description, site);
  return write(communicator, sequence, digest, description, site);
}

std::size_t FlightRecorder::begin_message(std::uint64_t communicator, std::uint64_t number, std::int32_t peer,
                                          const std::shared_ptr<const std::string>& description, const CallSite& site) {
  const std::lock_guard held(lock_);
  const std::size_t index = write(communicator | point_to_point_record, number, 0, description, site);
  records_[index].peer = peer;
  return index;
}

void FlightRecorder::set_site(std::size_t index, const CallSite& site) {
  const std::lock_guard held(lock_);
  records_[index].site = site;
}

std::string FlightRecorder::name_of(std::uint64_t communicator) const {
  const auto named = names_.find(communicator & ~point_to_point_record);
  return named == names_.end() ? "" : named->second;
}

CallRecord FlightRecorder::record(std::size_t index) const {
  CallRecord record = records_[index];
  record.returned = returned_[index].load(std::memory_order_relaxed);
  record.where = name_of(record.communicator);
  if ((record.communicator & point_to_point_record) == 0) record.peer = -1;
  return record;
}

CallRecord FlightRecorder::record(std::uint64_t communicator, const CallHistory::Entry& entry) const {
  return {communicator, entry.sequence, entry.digest, entry.description, entry.site, -1, name_of(communicator), true};
}

std::optional<CallRecord> FlightRecorder::find(std::uint64_t communicator, std::uint64_t sequence) const {
  const std::lock_guard held(lock_);
  for (std::size_t index = 0; index < capacity; ++index) {
    const CallRecord& candidate = records_[index];
    if (candidate.description && candidate.communicator == communicator && candidate.sequence == sequence)
      return record(index);
  }
  const auto entry = history_.find(communicator, sequence);
  return entry ? std::optional(record(communicator, *entry)) : std::nullopt;
}

std::optional<CallRecord> FlightRecorder::last(std::uint64_t communicator) const {
  const std::lock_guard held(lock_);
  const auto entry = history_.last(communicator);
  if (!entry) return std::nullopt;
  for (std::size_t index = 0; index < capacity; ++index) {
    const CallRecord& candidate = records_[index];
    if (candidate.description && candidate.communicator == communicator && candidate.sequence == entry->sequence)
      return record(index);
  }
  return record(communicator, *entry);
}

std::optional<CallRecord> FlightRecorder::running() const {
  const std::lock_guard held(lock_);
  for (std::uint64_t back = 1; back <= std::min<std::uint64_t>(begun_, capacity); ++back) {
    const std::size_t index = (begun_ - back) % capacity;
    if (!returned_[index].load(std::memory_order_relaxed)) return record(index);
  }
  return std::nullopt;
}

std::optional<CallRecord> FlightRecorder::latest() const {
  const std::lock_guard held(lock_);
  return begun_ == 0 ? std::nullopt : std::optional(record(static_cast<std::size_t>((begun_ - 1) % capacity)));
}

}  // namespace unisono
