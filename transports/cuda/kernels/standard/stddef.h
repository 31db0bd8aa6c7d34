// What the kernels need of this header of the standard library, which NVRTC has not.
#pragma once

typedef decltype(sizeof(0)) size_t;
