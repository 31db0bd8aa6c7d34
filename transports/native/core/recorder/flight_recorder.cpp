#include "recorder/flight_recorder.h"

#include <algorithm>
#include <mutex>
#include <utility>

#include "system/cache_line.h"

namespace unisono {

std::string CallRecord::text() const {
  std::string shown = description ? description->text : "?";
  shown += where;
  if (site.file != nullptr) shown += std::string(" at ") + site.file + ":" + std::to_string(site.line);
  return shown;
}

void FlightRecorder::name(std::uint64_t communicator, std::string where) {
  const std::lock_guard held(lock_);
  memory_.name(communicator, where);
  names_.insert_or_assign(communicator, std::move(where));
}

void FlightRecorder::close(std::uint64_t communicator) {
  const std::lock_guard held(lock_);
  if (!names_.contains(communicator)) return;
  closed_.push_back(communicator);
  if (closed_.size() <= most_closed) return;
  names_.erase(closed_.front());
  closed_.pop_front();
}

void CallHistory::begin_run(std::uint64_t communicator, std::uint64_t sequence, std::uint64_t digest,
                            const SharedDescription& description, const CallSite& site) {
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

std::uint64_t FlightRecorder::place_of(const Description& description) {
  if (!memory_.keeps(description.place)) description.place = memory_.put(description.text + '\n' + description.facts);
  return description.place;
}

std::uint64_t FlightRecorder::place_of(const char* file) {
  if (file == nullptr) return 0;
  std::uint64_t& place = files_[file];
  if (!memory_.keeps(place)) place = memory_.put(file);
  return place;
}

// Gets a record into the cache of this core before the next call writes it. All records together are larger than the
// fastest cache.
void FlightRecorder::prefetch(std::size_t index) const {
  const auto* record = reinterpret_cast<const std::byte*>(&memory_.record(index));
  for (std::size_t offset = 0; offset < sizeof(FlightRecord); offset += cache_line)
    __builtin_prefetch(record + offset, 1);
  __builtin_prefetch(&kept_[index], 1);
}

std::size_t FlightRecorder::write(std::uint64_t communicator, std::uint64_t sequence, std::uint64_t digest,
                                  std::int32_t peer, std::uint64_t nbytes, const SharedDescription& description,
                                  const CallSite& site, std::int64_t called_ns) {
  const std::size_t index = next_;
  ++begun_;
  next_ = index + 1 == kept_.size() ? 0 : index + 1;
  prefetch(next_);
  FlightRecord& record = memory_.record(index);
  Kept& kept = kept_[index];
  record.number.store(0, std::memory_order_relaxed);
  std::atomic_thread_fence(std::memory_order_release);
  record.communicator = communicator;
  record.sequence = sequence;
  record.digest = digest;
  record.nbytes = nbytes;
  record.begun_ns = std::max(now_ns(), called_ns);
  record.called_ns = called_ns == 0 ? record.begun_ns : called_ns;
  record.moved_ns.store(0, std::memory_order_relaxed);
  record.ended_ns.store(0, std::memory_order_relaxed);
  record.peer = peer;
  record.dtype = description->dtype;
  record.waits_for.store(-1, std::memory_order_relaxed);
  record.state.store(RecordState::running, std::memory_order_relaxed);
  kept.listens = false;
  // If the program repeats a call, the slot has its description already. Then the reference count, which costs an
  // atomic operation, stays untouched.
  if (kept.description != description) kept.description = description;
  kept.site = site;
  if (memory_.is_published()) {
    record.description = place_of(*description);
    record.file = place_of(site.file);
    record.line = site.line;
  }
  record.number.store(begun_, std::memory_order_release);
  memory_.header().calls.store(begun_, std::memory_order_release);
  return index;
}

std::size_t FlightRecorder::begin(std::uint64_t communicator, std::uint64_t sequence, std::uint64_t digest,
                                  const SharedDescription& description, const CallSite& site, std::int64_t called_ns) {
  const std::lock_guard held(lock_);
  history_.add(communicator, sequence, digest, description, site);
  return write(communicator, sequence, digest, -1, description->nbytes, description, site, called_ns);
}

std::size_t FlightRecorder::begin_message(std::uint64_t communicator, std::uint64_t number, std::int32_t peer,
                                          const SharedDescription& description, const CallSite& site,
                                          std::uint64_t nbytes, std::int64_t called_ns) {
  const std::lock_guard held(lock_);
  return write(communicator | point_to_point_record, number, 0, peer, nbytes, description, site, called_ns);
}

void FlightRecorder::set_site(std::size_t index, const CallSite& site) {
  const std::lock_guard held(lock_);
  kept_[index].site = site;
  if (!memory_.is_published()) return;
  FlightRecord& record = memory_.record(index);
  record.file = place_of(site.file);
  record.line = site.line;
}

std::string FlightRecorder::name_of(std::uint64_t communicator) const {
  const auto named = names_.find(communicator & ~point_to_point_record);
  return named == names_.end() ? "" : named->second;
}

CallRecord FlightRecorder::record(std::size_t index) const {
  const FlightRecord& record = memory_.record(index);
  const Kept& kept = kept_[index];
  return {record.communicator,
          record.sequence,
          record.digest,
          kept.description,
          kept.site,
          record.peer,
          name_of(record.communicator),
          record.state.load(std::memory_order_acquire) != RecordState::running};
}

void FlightRecorder::listen(std::size_t index, std::uint64_t communicator, std::uint64_t number) {
  const std::lock_guard held(lock_);
  if (is_of(index, communicator | point_to_point_record, number)) kept_[index].listens = true;
}

bool FlightRecorder::is_of(std::size_t index, std::uint64_t communicator, std::uint64_t sequence) const {
  const FlightRecord& record = memory_.record(index);
  return kept_[index].description != nullptr && record.communicator == communicator && record.sequence == sequence;
}

CallRecord FlightRecorder::record(std::uint64_t communicator, const CallHistory::Entry& entry) const {
  return {communicator, entry.sequence, entry.digest, entry.description, entry.site, -1, name_of(communicator), true};
}

std::optional<CallRecord> FlightRecorder::find(std::uint64_t communicator, std::uint64_t sequence) const {
  const std::lock_guard held(lock_);
  for (std::size_t index = 0; index < kept_.size(); ++index)
    if (is_of(index, communicator, sequence)) return record(index);
  const auto entry = history_.find(communicator, sequence);
  return entry ? std::optional(record(communicator, *entry)) : std::nullopt;
}

std::optional<CallRecord> FlightRecorder::last(std::uint64_t communicator) const {
  const std::lock_guard held(lock_);
  const auto entry = history_.last(communicator);
  if (!entry) return std::nullopt;
  for (std::size_t index = 0; index < kept_.size(); ++index)
    if (is_of(index, communicator, entry->sequence)) return record(index);
  return record(communicator, *entry);
}

std::optional<CallRecord> FlightRecorder::running() const {
  const std::lock_guard held(lock_);
  for (std::uint64_t back = 1; back <= std::min<std::uint64_t>(begun_, kept_.size()); ++back) {
    const std::size_t index = (begun_ - back) % kept_.size();
    const bool runs = memory_.record(index).state.load(std::memory_order_acquire) == RecordState::running;
    if (runs && !kept_[index].listens) return record(index);
  }
  return std::nullopt;
}

std::vector<CallRecord> FlightRecorder::last_ended(std::size_t most) const {
  const std::lock_guard held(lock_);
  std::vector<CallRecord> calls;
  for (std::uint64_t back = 1; back <= std::min<std::uint64_t>(begun_, kept_.size()) && calls.size() < most; ++back) {
    const auto index = static_cast<std::size_t>((begun_ - back) % kept_.size());
    if (memory_.record(index).state.load(std::memory_order_acquire) == RecordState::done)
      calls.push_back(record(index));
  }
  return calls;
}

std::optional<CallRecord> FlightRecorder::latest() const {
  const std::lock_guard held(lock_);
  return begun_ == 0 ? std::nullopt : std::optional(record(static_cast<std::size_t>((begun_ - 1) % kept_.size())));
}

}  // namespace unisono
