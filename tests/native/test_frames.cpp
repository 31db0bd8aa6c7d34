#include "check.h"
#include "control/frame.h"

using namespace unisono;
using namespace unisono::testing;

namespace {

Frame sample() {
  Frame frame;
  frame.type = FrameType::answer;
  frame.state = CallState::running;
  frame.rank = 3;
  frame.peer = -1;
  frame.waits_for = 2;
  frame.communicator = 0xfedcba9876543210;
  frame.sequence = 41;
  frame.number = 9;
  frame.time_left_us = 250'000;
  frame.digest = 17;
  frame.text = "allreduce(float32[8], op=sum) at train.py:12";
  frame.members = {0, 3, 7};
  return frame;
}

void a_decoded_frame_equals_the_encoded_one() {
  Frame frame;
  frame.type = FrameType::leaving;
  std::string bytes = encode(sample()) + encode(frame);
  CHECK(decode(bytes, frame));
  CHECK(frame.type == FrameType::answer && frame.state == CallState::running && frame.rank == 3 && frame.peer == -1);
  CHECK(frame.communicator == sample().communicator && frame.sequence == 41 && frame.digest == 17);
  CHECK(frame.waits_for == 2 && frame.number == 9 && frame.time_left_us == 250'000);
  CHECK(frame.text == sample().text && frame.members == sample().members);
  CHECK(decode(bytes, frame) && frame.text.empty() && frame.members.empty());
  CHECK(bytes.empty() && !decode(bytes, frame));
}

void an_incomplete_frame_is_not_decoded() {
  const std::string whole = encode(sample());
  for (std::size_t nbytes = 0; nbytes < whole.size(); ++nbytes) {
    std::string part = whole.substr(0, nbytes);
    Frame frame;
    CHECK(!decode(part, frame) && part.size() == nbytes);
  }
}

void a_long_text_is_cut() {
  Frame frame = sample();
  frame.text.assign(1 << 20, 'x');
  std::string bytes = encode(frame);
  Frame back;
  CHECK(decode(bytes, back) && bytes.empty());
  CHECK(back.text == frame.text.substr(0, back.text.size()) && !back.text.empty() && back.text.size() < 1 << 14);
}

// Python reads texts, and cannot read a part of a character.
void a_text_is_cut_between_characters() {
  for (const std::size_t before : {0, 1, 2}) {
    Frame frame = sample();
    frame.text.assign(before, 'x');
    while (frame.text.size() < 5000) frame.text += "\u20ac";  // 3 bytes
    std::string bytes = encode(frame);
    Frame back;
    CHECK(decode(bytes, back) && back.text.size() > 4090 && (back.text.size() - before) % 3 == 0);
    CHECK(frame.text.starts_with(back.text));
  }
}

void bytes_of_a_text_that_are_no_characters_are_replaced() {
  const std::pair<std::string, std::string> texts[] = {
      {"a\xff\u20ac", "a?\u20ac"}, {"\xe2\x82", "??"},           {"\xc0\x80", "??"},
      {"\xed\xa0\x80", "???"},     {"\xf4\x90\x80\x80", "????"}, {"\xf0\x9f\x98\x80", "\xf0\x9f\x98\x80"},
  };
  for (const auto& [sent, received] : texts) {
    Frame frame = sample();
    frame.text = sent;
    std::string bytes = encode(frame);
    Frame back;
    CHECK(decode(bytes, back) && back.text == received);
  }
}

void a_failure_without_a_kind_is_refused() {
  Frame frame = sample();
  frame.type = FrameType::failure;
  frame.failure = FailureKind::none;
  std::string bytes = encode(frame);
  CHECK(throws<std::runtime_error>([&] { decode(bytes, frame); }));
}

void invalid_bytes_are_refused() {
  for (const std::size_t place : {0, 1, 2, 19, 23}) {  // type, failure, state, length, number of members
    std::string bytes = encode(sample());
    bytes[place] = '\xff';
    Frame frame;
    CHECK(throws<std::runtime_error>([&] { decode(bytes, frame); }));
  }
}

void mutated_frames_are_decoded_or_refused() {
  Dice dice(1);
  for (int round = 0; round < 50000; ++round) {
    std::string bytes;
    for (std::size_t i = 0; i <= dice.below(3); ++i) bytes += encode(sample());
    for (std::size_t i = dice.below(6); i > 0; --i) bytes[dice.below(bytes.size())] = static_cast<char>(dice.word());
    bytes.resize(dice.below(bytes.size() + 1));
    try {
      Frame frame;
      for (std::size_t before = bytes.size(); decode(bytes, frame); before = bytes.size())
        CHECK(bytes.size() < before && frame.text.size() <= 4096);
    } catch (const std::runtime_error&) {
    }
  }
}

}  // namespace

int main() {
  return run_tests({
      {"a decoded frame equals the encoded one", a_decoded_frame_equals_the_encoded_one},
      {"an incomplete frame is not decoded", an_incomplete_frame_is_not_decoded},
      {"a long text is cut", a_long_text_is_cut},
      {"a text is cut between characters", a_text_is_cut_between_characters},
      {"bytes of a text that are no characters are replaced", bytes_of_a_text_that_are_no_characters_are_replaced},
      {"a failure without a kind is refused", a_failure_without_a_kind_is_refused},
      {"invalid bytes are refused", invalid_bytes_are_refused},
      {"mutated frames are decoded or refused", mutated_frames_are_decoded_or_refused},
  });
}
