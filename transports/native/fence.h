// A pair of fences for two sides that each write one place and then read the other's (Dekker): `light_fence` on the
// side that passes often, `heavy_fence` on the side that passes rarely. Together they act like two full fences.
//
// A full fence waits until earlier stores are visible to all cores, which costs a message as much again as its transfer
// does. Linux lets one side pay for both: membarrier(2) makes every core that runs a registered process pass a full
// fence. Where the kernel refuses it, both are full fences.
#pragma once

namespace unisono {

void light_fence();
void heavy_fence();

}  // namespace unisono
