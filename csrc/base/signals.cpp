#include "base/signals.h"

#include <csignal>
#include <cstring>
#include <pthread.h>

namespace flashckpt {

SignalsBlocked::SignalsBlocked() {
    static_assert(sizeof(sigset_t) <= sizeof(saved_));
    sigset_t all;
    sigset_t before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    std::memcpy(saved_, &before, sizeof(before));
}

SignalsBlocked::~SignalsBlocked() {
    sigset_t before;
    std::memcpy(&before, saved_, sizeof(before));
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
}

} // namespace flashckpt
