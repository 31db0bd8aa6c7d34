// Writes the seeds of the fuzzing targets into a folder: write_seeds tests/native/fuzz/seeds
#include <filesystem>
#include <fstream>
#include <initializer_list>
#include <string>

#include "control/frame.h"
#include "plan_words.h"

using namespace unisono;
using namespace unisono::testing;

namespace {

class Seed {
 public:
  template <class T>
  Seed& put(T value) {
    bytes_.append(reinterpret_cast<const char*>(&value), sizeof value);
    return *this;
  }
  Seed& put(const std::string& text) {
    bytes_ += text;
    return *this;
  }
  void write(const std::filesystem::path& folder, const std::string& name) const {
    std::filesystem::create_directories(folder);
    std::ofstream(folder / name, std::ios::binary) << bytes_;
  }

 private:
  std::string bytes_;
};

void write_frames(const std::filesystem::path& folder) {
  Frame frame;
  frame.rank = 3;
  const std::string short_one = encode(frame);
  frame.type = FrameType::answer;
  frame.state = CallState::running;
  frame.text = "allreduce(float32[8], op=sum) at train.py:12";
  frame.members = {0, 3, 7};
  const std::string long_one = encode(frame);
  const auto size_of = [](const std::string& text) { return static_cast<std::uint8_t>(text.size()); };
  Seed().put(size_of(short_one)).put(short_one).put(size_of(long_one)).put(long_one).write(folder, "two");
  Seed()
      .put(std::uint8_t{20})
      .put(long_one.substr(0, 20))
      .put(std::uint8_t{200})
      .put(long_one.substr(20))
      .write(folder, "cut");
}

void write_control(const std::filesystem::path& folder) {
  Frame frame;
  frame.rank = 1;
  frame.communicator = 3;
  frame.sequence = 1;
  frame.text = "barrier() at train.py:12";
  Seed all;
  all.put(std::uint8_t{1});
  for (std::uint8_t type = 1; type <= static_cast<std::uint8_t>(FrameType::time); ++type) {
    frame.type = static_cast<FrameType>(type);
    frame.failure = type == 1 ? FailureKind::aborted : FailureKind::none;
    const std::string bytes = encode(frame);
    all.put(static_cast<std::uint8_t>(type % 2)).put(static_cast<std::uint8_t>(bytes.size())).put(bytes);
  }
  all.write(folder, "every_type");
}

void write_tcp(const std::filesystem::path& folder) {
  const auto channel = [](std::uint8_t checksum, std::uint8_t streams) {
    Seed seed;
    seed.put(checksum).put(streams);
    return seed;
  };
  for (const std::uint8_t checksum : {std::uint8_t{0}, std::uint8_t{1}}) {
    Seed messages = channel(checksum, checksum);
    for (const std::uint16_t nbytes : std::initializer_list<std::uint16_t>{0, 1, 100, 40000})
      messages.put(std::uint8_t{0}).put(std::uint8_t{0}).put(nbytes).put(std::uint32_t{7}).put(std::uint8_t{0});
    messages.write(folder, checksum == 0 ? "messages" : "checked_messages");
  }
  channel(0, 0)
      .put(std::uint8_t{0})
      .put(std::uint8_t{1})
      .put(~std::uint64_t{0})
      .put(std::uint32_t{7})
      .put(std::uint8_t{1})
      .write(folder, "endless");
  channel(0, 0)
      .put(std::uint8_t{1})
      .put(std::uint8_t{0})
      .put(std::uint8_t{64})
      .put(std::string("UNSO") + std::string(60, '\0'))
      .write(folder, "raw");
  Seed broken = channel(0, 1);
  for (int i = 0; i < 3; ++i) broken.put(std::uint8_t{2}).put(std::uint16_t{100});
  for (const std::uint16_t received : std::initializer_list<std::uint16_t>{328, 64, 0, 5000})
    broken.put(std::uint8_t{3}).put(std::uint8_t{0}).put(~std::uint32_t{0}).put(std::uint8_t{0}).put(received).put(1);
  broken.write(folder, "broken");
}

void write_shm(const std::filesystem::path& folder) {
  const auto send = [](Seed& seed, std::uint8_t move, std::uint16_t number) { seed.put(move).put(number); };
  Seed exchange;
  for (const std::uint16_t number : std::initializer_list<std::uint16_t>{0, 16, 17, 0xf000, 0xffff}) {
    send(exchange, 1, number);
    exchange.put(std::uint8_t{4});
    send(exchange, 3, number);
    exchange.put(std::uint8_t{2});
  }
  exchange.write(folder, "exchange");
  Seed scribbles;
  for (std::uint16_t place = 0; place < 24; ++place) {
    send(scribbles, 1, 0xf000);
    scribbles.put(std::uint8_t{0}).put(place).put(std::uint32_t{65537}).put(std::uint8_t{4});
  }
  scribbles.write(folder, "scribbles");
}

void write_plans(const std::filesystem::path& folder) {
  const auto write = [&](const char* name, const PlanWords& plan) {
    const auto words = plan.encode();
    Seed seed;
    seed.put(static_cast<std::uint16_t>(words.size()));
    for (const std::int64_t word : words) seed.put(word);
    for (int i = 0; i < 12; ++i) seed.put(static_cast<std::uint8_t>(11));  // elements, types, segments
    seed.write(folder, name);
  };
  write("ring", ring_allreduce(3, 1));
  write("direct", direct_allreduce(4, 3));
  write("doubling", doubling_allreduce(4, 2));
  write("two_lanes", two_lane_allreduce(0));
  write("empty_groups", empty_groups_allreduce(1));
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 2) return 2;
  const std::filesystem::path folder = argv[1];
  write_control(folder / "control");
  write_frames(folder / "frames");
  write_tcp(folder / "tcp");
  write_shm(folder / "shm");
  write_plans(folder / "plans");
  return 0;
}
