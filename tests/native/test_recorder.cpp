#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <csignal>
#include <cstring>
#include <string>
#include <thread>

#include "check.h"
#include "ranks.h"
#include "recorder/flight_recorder.h"
#include "system/signal_events.h"

using namespace unisono;
using namespace unisono::testing;

namespace {

std::string text_at(const FlightMemory& memory, std::uint64_t place) {
  const FlightHeader& header = memory.header();
  const auto* begin = reinterpret_cast<const char*>(&header);
  return begin + header.texts_offset + place % header.texts_nbytes;
}

void a_call_is_recorded_with_its_times_and_its_end() {
  FlightRecorder recorder(1, 4, 100);
  const FlightMemory& memory = recorder.memory();
  CHECK(memory.is_published() && memory.header().rank == 1 && memory.header().size == 4);
  const std::size_t index = recorder.begin(0, 5, 77, description("barrier()"), {"train.py", 12}, 3);
  const FlightRecord& record = memory.record(index);
  CHECK(record.number == 1 && record.sequence == 5 && record.digest == 77 && record.called_ns == 3);
  CHECK(record.begun_ns > 3 && record.moved_ns == 0 && record.ended_ns == 0 && record.line == 12);
  CHECK(record.state == RecordState::running && record.waits_for == -1 && record.peer == -1);
  CHECK(text_at(memory, record.description) == "barrier()\n{}" && text_at(memory, record.file) == "train.py");
  recorder.move(index);
  recorder.wait(index, 2);
  recorder.end(index, RecordState::failed);
  CHECK(record.moved_ns >= record.begun_ns && record.ended_ns >= record.moved_ns && record.waits_for == 2);
  CHECK(record.state == RecordState::failed && memory.header().calls == 1);
}

void texts_in_use_are_written_again_before_they_are_overwritten() {
  FlightRecorder recorder(0, 1, 100);
  const auto repeated = description("the call that the program repeats");
  for (int number = 0; number < 20'000; ++number) {
    recorder.begin(0, 2 * static_cast<std::uint64_t>(number), 1, description("call " + std::to_string(number)), {});
    const std::size_t index = recorder.begin(0, 2 * static_cast<std::uint64_t>(number) + 1, 2, repeated, {});
    const std::uint64_t place = recorder.memory().record(index).description;
    CHECK(recorder.memory().keeps(place) && text_at(recorder.memory(), place) == repeated->text + "\n{}");
  }
}

void long_texts_and_names_are_cut() {
  FlightMemory memory(0, 1, 100);
  const std::uint64_t place = memory.put(std::string(100'000, 'x'));
  CHECK(text_at(memory, place).size() == 4096);
  memory.name(9, std::string(100'000, 'y'));
  const auto* begin = reinterpret_cast<const char*>(&memory.header());
  CHECK(std::string(begin + memory.header().communicators_offset + 8).size() == 247);
  bool refused = false;
  try {
    memory.describe(std::string(100'000, 'z'));
  } catch (const std::invalid_argument&) {
    refused = true;
  }
  CHECK(refused && memory.header().about_nbytes == 0);
}

void a_traffic_record_is_used_again_only_after_its_release() {
  FlightMemory memory(0, 1, 100);
  std::vector<TrafficSlot> slots;
  while (TrafficSlot slot = memory.traffic(3, "a transport with a long name")) slots.push_back(std::move(slot));
  CHECK(slots.size() == 512 && std::string(slots[0]->transport) == "a transport wit");
  slots[7]->counters.sent_nbytes += 5;
  TrafficRecord* const freed = slots[7].get();
  slots[7].reset();
  slots[7] = memory.traffic(4, "tcp");
  CHECK(slots[7].get() == freed && freed->peer == 4 && freed->counters.sent_nbytes == 0);
  slots.clear();
  std::atomic<int> taken{0};
  std::vector<std::thread> threads;
  for (int number = 0; number < 4; ++number)
    threads.emplace_back([&, number] {
      for (int turn = 0; turn < 1'000; ++turn)
        if (TrafficSlot slot = memory.traffic(number, "shm")) {
          slot->counters.sent_nbytes += 1;
          if (slot->counters.sent_nbytes == 1) ++taken;
        }
    });
  for (std::thread& thread : threads) thread.join();
  CHECK(taken == 4'000);
}

void a_recorder_without_a_depth_is_private_and_still_quotes_calls() {
  FlightRecorder recorder(0, 1, 0);
  recorder.end(recorder.begin(0, 0, 1, description("barrier()"), {"train.py", 12}));
  CHECK(!recorder.memory().is_published() && recorder.memory().record(0).ended_ns == 0);
  CHECK(recorder.latest()->text() == "barrier() at train.py:12" && recorder.last_ended(5).size() == 1);
}

void a_message_that_is_awaited_at_all_times_is_not_the_call_that_a_rank_is_in() {
  FlightRecorder recorder(0, 1, 100);
  recorder.begin(0, 0, 1, description("barrier()"), {"train.py", 12});
  const std::size_t listener = recorder.begin_message(0, 7, -1, description("probe()"), {"server.py", 3});
  CHECK(recorder.running()->text() == "probe() at server.py:3");
  recorder.listen(listener, 0, 8);  // another message, whose record has been replaced
  CHECK(recorder.running()->text() == "probe() at server.py:3");
  recorder.listen(listener, 0, 7);
  CHECK(recorder.running()->text() == "barrier() at train.py:12");
  CHECK(recorder.latest()->text() == "probe() at server.py:3");
}

void only_the_rank_can_write_the_memory() {
  FlightRecorder recorder(0, 1, 100);
  for (int descriptor = 0; descriptor < 64; ++descriptor) {
    const std::string path = "/proc/self/fd/" + std::to_string(descriptor);
    char target[64] = {};
    if (::readlink(path.c_str(), target, sizeof target - 1) < 0) continue;
    if (std::string(target).find("unisono-flight-recorder") == std::string::npos) continue;
    const Descriptor reader(::open(path.c_str(), O_RDONLY | O_CLOEXEC));
    const Descriptor writer(::open(path.c_str(), O_RDWR | O_CLOEXEC));
    CHECK(reader.valid());
    CHECK(!writer.valid() || ::mmap(nullptr, 4096, PROT_WRITE, MAP_SHARED, writer.get(), 0) == MAP_FAILED);
    CHECK(!writer.valid() || ::ftruncate(writer.get(), 1) != 0);
    return;
  }
  CHECK(false);
}

void a_signal_is_an_event_until_the_last_one_is_forgotten() {
  Doorbell one;
  Doorbell other;
  const auto rings = [](const Doorbell& bell) {
    pollfd wait{bell.get(), POLLIN, 0};
    const bool rung = ::poll(&wait, 1, 0) == 1;
    bell.drain();
    return rung;
  };
  notify_of_signal(one.get());
  notify_of_signal(other.get());
  std::raise(SIGUSR1);
  CHECK(rings(one) && rings(other));
  forget_signal(one.get());
  std::raise(SIGUSR1);
  CHECK(!rings(one) && rings(other));
  const auto handler = [] {
    struct sigaction action{};
    ::sigaction(SIGUSR1, nullptr, &action);
    return action.sa_handler;
  };
  forget_signal(other.get());
  CHECK(handler() == SIG_DFL);
  std::signal(SIGUSR1, SIG_IGN);
  notify_of_signal(one.get());
  CHECK(handler() == SIG_IGN);
  forget_signal(one.get());
  CHECK(handler() == SIG_IGN);
}

}  // namespace

int main() {
  return run_tests({
      {"a call is recorded with its times and its end", a_call_is_recorded_with_its_times_and_its_end},
      {"texts in use are written again before they are overwritten",
       texts_in_use_are_written_again_before_they_are_overwritten},
      {"long texts and names are cut", long_texts_and_names_are_cut},
      {"a traffic record is used again only after its release", a_traffic_record_is_used_again_only_after_its_release},
      {"a recorder without a depth is private and still quotes calls",
       a_recorder_without_a_depth_is_private_and_still_quotes_calls},
      {"a message that is awaited at all times is not the call that a rank is in",
       a_message_that_is_awaited_at_all_times_is_not_the_call_that_a_rank_is_in},
      {"only the rank can write the memory", only_the_rank_can_write_the_memory},
      {"a signal is an event until the last one is forgotten", a_signal_is_an_event_until_the_last_one_is_forgotten},
  });
}
