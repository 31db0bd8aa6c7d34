#include "kernels/dtype.h"

#include <map>
#include <mutex>

namespace unisono {

const std::array<DTypeInfo, dtype_count> dtype_table = {{
    {"bool", 1},
    {"int8", 1},
    {"uint8", 1},
    {"int16", 2},
    {"uint16", 2},
    {"int32", 4},
    {"uint32", 4},
    {"int64", 8},
    {"uint64", 8},
    {"float16", 2},
    {"bfloat16", 2},
    {"float32", 4},
    {"float64", 8},
    {"float8_e4m3fn", 1},
    {"float8_e5m2", 1},
    {"complex64", 8},
    {"complex128", 16},
}};

namespace {

struct NamedTypes {
  std::mutex mutex;
  std::map<std::uint32_t, TypeText> by_number;
};

// It is never destroyed, because threads that outlive the end of the program may use it.
NamedTypes& named_types() {
  static auto& types = *new NamedTypes;
  return types;
}

}  // namespace

void name_type(ElementType type, std::string_view name, std::size_t itemsize) {
  NamedTypes& types = named_types();
  const std::lock_guard lock(types.mutex);
  types.by_number.try_emplace(type.number, TypeText{std::string(name), itemsize});
}

TypeText text_of(ElementType type) {
  if (!type.is_moved_as_bytes()) {
    const DTypeInfo& info = dtype_table[type.number];
    return {std::string(info.name), info.itemsize};
  }
  NamedTypes& types = named_types();
  const std::lock_guard lock(types.mutex);
  const auto entry = types.by_number.find(type.number);
  return entry != types.by_number.end() ? entry->second : TypeText{"bytes of a dtype unknown here", 1};
}

}  // namespace unisono
