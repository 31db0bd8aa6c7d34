// A kernel for the double of the driver: stores bytes, each increased by `shift`.
#include <stddef.h>
#include <stdint.h>

namespace {

constexpr size_t words_nbytes = 24;
constexpr size_t sizes[] = {sizeof(char*), sizeof(char), words_nbytes, 0};

}  // namespace

extern "C" {
extern const size_t* const store_sizes_of_parameters;
const size_t* const store_sizes_of_parameters = sizes;
extern const uint32_t store_threads;
const uint32_t store_threads = 512;

void store_on_host(uint32_t, void* const* arguments) {
  char* to = *static_cast<char* const*>(arguments[0]);
  const char shift = *static_cast<const char*>(arguments[1]);
  const char* words = static_cast<const char*>(arguments[2]);
  for (size_t i = 0; i < words_nbytes; ++i) to[i] = static_cast<char>(words[i] + shift);
}
}
