// The part of this standard header that the kernels need, because NVRTC has no standard headers.
#pragma once

typedef decltype(sizeof(0)) size_t;
