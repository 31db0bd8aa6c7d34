// Tagged messages by the MPI library that the process has loaded.
//
// Its functions are looked up by name, and mpi4py provides the handles, so the build needs no MPI. Handles are pointers
// in Open MPI and integers in MPICH and its derivatives, so code with handles is a template over their type. The
// communicator is our own, and its errors are returned.
#pragma once

#include <memory>
#include <string>

#include "tagged/messenger.h"

namespace unisono {

//! The handles of MPI, as mpi4py has them.
struct MpiHandles {
  std::uintptr_t communicator;
  std::uintptr_t byte;  // MPI_BYTE
  bool pointers;        // whether handles are pointers
  std::uint64_t most_tag;
};

//! Returns a messenger for the MPI library at the path `library`. Throws std::runtime_error if the library lacks a
//! function.
std::unique_ptr<Messenger> make_mpi_messenger(const std::string& library, const MpiHandles& handles);

}  // namespace unisono
