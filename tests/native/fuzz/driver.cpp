// Drives a fuzzing target without libFuzzer: fuzz_TARGET FOLDER TIMES runs each file of the folder, and then TIMES
// random changes of these files, the same in each run.
#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <vector>

#include "fuzz.h"

using namespace unisono::testing;

namespace {

using Bytes = std::vector<std::uint8_t>;

std::vector<Bytes> read_seeds(const char* folder) {
  std::vector<std::filesystem::path> paths;
  for (const auto& entry : std::filesystem::directory_iterator(folder)) paths.push_back(entry.path());
  std::sort(paths.begin(), paths.end());
  std::vector<Bytes> seeds;
  for (const auto& path : paths) {
    std::ifstream file(path, std::ios::binary);
    seeds.emplace_back(std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>());
  }
  return seeds;
}

void change(Bytes& bytes, const Bytes& other, Dice& dice) {
  for (std::size_t i = dice.below(4); i > 0 && !bytes.empty(); --i) {
    const std::size_t place = dice.below(bytes.size());
    const std::uint64_t word = dice.awkward();
    const std::size_t width = std::min<std::size_t>(std::size_t{1} << dice.below(4), bytes.size() - place);
    std::memcpy(bytes.data() + place, &word, width);
  }
  if (dice.below(4) == 0) bytes.resize(dice.below(bytes.size() + 1));
  if (dice.below(4) == 0) bytes.insert(bytes.end(), other.begin(), other.end());
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 3) return 2;
  const std::vector<Bytes> seeds = read_seeds(argv[1]);
  if (seeds.empty()) return 2;
  for (const Bytes& seed : seeds) LLVMFuzzerTestOneInput(seed.data(), seed.size());
  Dice dice(1);
  for (long i = std::atol(argv[2]); i > 0; --i) {
    Bytes bytes = seeds[dice.below(seeds.size())];
    change(bytes, seeds[dice.below(seeds.size())], dice);
    LLVMFuzzerTestOneInput(bytes.data(), bytes.size());
  }
  return 0;
}
