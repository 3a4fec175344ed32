// The digest kernel as PTX: csrc/device/digest.ptx, which CMake embeds into the library.
#pragma once

namespace flashckpt {

extern const char kDigestPtx[]; // ends with a zero
constexpr const char* kDigestKernel = "flashckpt_digest";

} // namespace flashckpt
