// Tagged messages by the MPI that the process has loaded.
//
// Its functions are looked up by name, and its handles come from mpi4py, so that nothing of an MPI is needed to build
// this. There are two kinds: handles are pointers in Open MPI, and integers in MPICH and what is derived from it; what
// takes handles is a template over their type. The communicator is one of our own, whose errors are returned.
#pragma once

#include <memory>
#include <string>

#include "messenger.h"

namespace unisono {

// As mpi4py has them.
struct MpiHandles {
  std::uintptr_t communicator;
  std::uintptr_t byte;  // MPI_BYTE
  bool pointers;        // whether handles are pointers
  std::uint64_t most_tag;
};

// `library` is the path of the MPI library. Throws std::runtime_error if it lacks a function.
std::unique_ptr<Messenger> make_mpi_messenger(const std::string& library, const MpiHandles& handles);

}  // namespace unisono
