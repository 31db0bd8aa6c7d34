// A pair of fences for two sides that each write one variable and then read the other's (Dekker). The side that passes
// often uses `light_fence`, and the side that passes rarely uses `heavy_fence`. Together they act like two full fences.
//
// A full fence waits until earlier stores are visible to all cores, which doubles the cost of a message. Linux lets one
// side pay for both: membarrier(2) makes every core that runs a registered process execute a full fence. Until the
// process is registered, and where the kernel refuses it, light fences are full fences.
#pragma once

namespace unisono {

//! Registers the process, once, in a thread of its own, because the kernel may keep the caller waiting for many
//! milliseconds.
void lighten_fences();

//! The fence of the frequent side.
void light_fence();
//! The fence of the rare side.
void heavy_fence();

}  // namespace unisono
