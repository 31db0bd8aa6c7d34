//! Pages of shared memory that are certain to exist before the memory is mapped.
#pragma once

#include <cstddef>

namespace unisono {

//! Reserves the first `nbytes` of the memfd `memory` if this system does not overcommit memory. Returns whether the
//! memory can be used, and sets errno otherwise.
//!
//! The pages of a memfd come into being when they are first touched. If vm.overcommit_memory is 2, the kernel may
//! refuse one then, by a SIGBUS that ends the process. So there, all pages are allocated at once, and the refusal is an
//! error. Other systems refuse no page, and give memory only to the pages that are used.
bool reserve_pages(int memory, std::size_t nbytes);

}  // namespace unisono
