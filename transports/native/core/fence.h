// A pair of fences for two sides that each write one place and then read the other's (Dekker): `light_fence` on the
// side that passes often, `heavy_fence` on the side that passes rarely. Together they act like two full fences.
//
// A full fence waits until earlier stores are visible to all cores, which costs a message as much again as its transfer
// does. Linux lets one side pay for both: membarrier(2) makes every core that runs a registered process pass a full
// fence. Until a process has been registered, and where the kernel refuses it, its light fences are full ones.
#pragma once

namespace unisono {

// Has the process registered, once, in a thread: the kernel lets the caller wait for many milliseconds.
void lighten_fences();

void light_fence();
void heavy_fence();

}  // namespace unisono
