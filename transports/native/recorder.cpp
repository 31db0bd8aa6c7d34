#include "recorder.h"

#include <utility>

namespace unisono {

std::string CallRecord::text() const {
  std::string shown = description ? *description : "?";
  if (site.file != nullptr) shown += std::string(" at ") + site.file + ":" + std::to_string(site.line);
  return shown;
}

std::size_t Recorder::begin(CallRecord record) {
  const std::lock_guard lock(mutex_);
  const std::size_t index = begun_++ % capacity;
  records_[index] = std::move(record);
  return index;
}

void Recorder::end(std::size_t index) {
  const std::lock_guard lock(mutex_);
  records_[index].returned = true;
}

std::optional<CallRecord> Recorder::find(std::uint64_t communicator, std::uint64_t sequence) const {
  const std::lock_guard lock(mutex_);
  for (const CallRecord& record : records_)
    if (record.description && record.communicator == communicator && record.sequence == sequence) return record;
  return std::nullopt;
}

std::optional<CallRecord> Recorder::last(std::uint64_t communicator) const {
  const std::lock_guard lock(mutex_);
  std::optional<CallRecord> found;
  for (const CallRecord& record : records_)
    if (record.description && record.communicator == communicator && (!found || found->sequence < record.sequence))
      found = record;
  return found;
}

}  // namespace unisono
