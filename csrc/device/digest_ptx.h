// The kernel of digests as PTX: csrc/device/digest.ptx, put into the library by CMake.
#pragma once

namespace flashckpt {

extern const char kDigestPtx[]; // ends with a zero
constexpr const char* kDigestKernel = "flashckpt_digest";

} // namespace flashckpt
