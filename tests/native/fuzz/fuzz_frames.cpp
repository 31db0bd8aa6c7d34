// Control links: any bytes are frames or are refused, in whatever parts they arrive.
#include "control/frame.h"
#include "fuzz.h"

using namespace unisono;
using namespace unisono::testing;

namespace {

void check_again(const Frame& frame) {
  std::string bytes = encode(frame);
  Frame again;
  CHECK(decode(bytes, again) && bytes.empty());
  CHECK(encode(again) == encode(frame));
}

}  // namespace

int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t nbytes) {
  Input input(data, nbytes);
  std::string bytes;
  try {
    while (!input.empty()) {
      const auto part = input.bytes(input.take<std::uint8_t>());
      bytes.append(part.begin(), part.end());
      Frame frame;
      for (std::size_t before = bytes.size(); decode(bytes, frame); before = bytes.size()) {
        CHECK(bytes.size() < before);
        check_again(frame);
      }
    }
  } catch (const std::runtime_error&) {
    // refused
  }
  return 0;
}
