// Events and the sealer.
#include "bindings/arguments.h"

#include "sync/event.h"
#include "sync/sealer.h"

#include <algorithm>
#include <chrono>
#include <memory>

namespace flashckpt {
namespace {

// Waits in slices, so that Ctrl-C can interrupt.
template <class Wait>
bool interruptible(double timeout_s, Wait wait) {
    constexpr double slice_s = 0.1;
    auto end = std::chrono::steady_clock::now() + bounded(timeout_s);
    for (;;) {
        std::chrono::duration<double> left = end - std::chrono::steady_clock::now();
        bool done;
        {
            Released released;
            done = wait(std::clamp(left.count(), 0.0, slice_s));
        }
        if (done) return true;
        if (into_python([] { return PyErr_CheckSignals(); }) != 0) throw nb::python_error();
        if (left.count() <= slice_s) return false;
    }
}

// Owns an event and its handle. A seal that waits for it keeps waiting after this object is destroyed.
class EventObject {
  public:
    EventObject() : event_(std::make_shared<HostEvent>()), handle_(enroll(event_)) {}
    ~EventObject() { retire(handle_); }
    EventObject(const EventObject&) = delete;
    EventObject& operator=(const EventObject&) = delete;

    std::uint64_t handle() const { return handle_; }
    HostEvent& event() const { return *event_; }

  private:
    std::shared_ptr<HostEvent> event_;
    std::uint64_t handle_;
};

std::vector<std::uint64_t> handles_of(nb::handle waits) {
    std::vector<std::uint64_t> handles;
    Held sequence = Held::steal(
        into_python([=] { return PySequence_Fast(waits.ptr(), "waits must be a list of handles"); }));
    if (!sequence) throw nb::python_error();
    Py_ssize_t count = PySequence_Fast_GET_SIZE(sequence.ptr());
    for (Py_ssize_t i = 0; i < count; ++i) {
        unsigned long long handle = PyLong_AsUnsignedLongLong(PySequence_Fast_GET_ITEM(sequence.ptr(), i));
        if (PyErr_Occurred() != nullptr) throw nb::python_error();
        handles.push_back(handle);
    }
    return handles;
}

// A u64 array of (address, bytes, entry of the table), flat.
std::vector<Landed> landed_of(nb::handle flat, std::uint64_t table_count) {
    if (flat.is_none()) return {};
    U64View view(flat);
    if (view.size() % 3 != 0) raise_value("landed must be triples of address, bytes and entry");
    std::vector<Landed> landed;
    for (std::size_t i = 0; i < view.size(); i += 3) {
        landed.push_back({view.data()[i], view.data()[i + 1], view.data()[i + 2]});
        if (landed.back().entry >= table_count) raise_value("landed has an entry past the table");
    }
    return landed;
}

std::vector<std::uint64_t> numbers_of(nb::handle flat) {
    if (flat.is_none()) return {};
    U64View view(flat);
    return {view.data(), view.data() + view.size()};
}

void submit(Sealer& sealer, nb::handle waits, std::uint64_t word, std::uint64_t expected,
            std::uint64_t desired, std::uint64_t record, std::uint64_t metadata, std::uint64_t metadata_bytes,
            std::uint64_t table, std::uint64_t table_count, std::uint64_t on_done_word, nb::handle landed,
            nb::handle held) {
    u64_pointer(word);
    if (record == 0) raise_value("record must be an address");
    if (metadata_bytes > 0 && metadata == 0) raise_value("metadata must be an address");
    if (table_count > 0) u64_pointer(table);
    if (on_done_word != 0) u64_pointer(on_done_word);
    std::vector<std::uint64_t> last = numbers_of(held);
    if (last.size() > table_count) raise_value("more digests are held than the table has");
    raise_if(
        sealer.submit({handles_of(waits), word, expected, desired, record, metadata, metadata_bytes, table,
                       table_count, on_done_word, landed_of(landed, table_count), std::move(last)}));
}

nb::list take_failures(Sealer& sealer) {
    nb::list out;
    for (const SealFailure& failure : sealer.failures()) {
        nb::str reason(failure.why.c_str());
        out.append(nb::make_tuple(failure.word, reason, failure.copied));
    }
    return out;
}

void close(Sealer& sealer) {
    Released released;
    sealer.close();
}

} // namespace

void bind_sync(nb::module_& module) {
    nb::class_<EventObject>(module, "HostEvent")
        .def(nb::init<>())
        .def_prop_ro("handle", &EventObject::handle)
        .def("set", [](EventObject& self) { self.event().set(); })
        .def("reset", [](EventObject& self) { self.event().reset(); })
        .def("query", [](EventObject& self) { return self.event().query(); })
        .def(
            "wait",
            [](EventObject& self, double timeout_s) {
                return interruptible(timeout_s, [&](double slice_s) { return self.event().wait(slice_s); });
            },
            nb::arg("timeout_s"));
    nb::class_<Sealer>(module, "Sealer")
        .def(nb::init<>())
        .def("submit", submit, nb::kw_only(), nb::arg("waits"), nb::arg("word"), nb::arg("expected"),
             nb::arg("desired"), nb::arg("record"), nb::arg("metadata"), nb::arg("metadata_bytes"),
             nb::arg("table"), nb::arg("table_count"), nb::arg("on_done_word") = 0,
             nb::arg("landed") = nb::none(), nb::arg("held") = nb::none())
        .def(
            "drain",
            [](Sealer& self, double timeout_s) {
                return interruptible(timeout_s, [&](double slice_s) { return self.drain(slice_s); });
            },
            nb::arg("timeout_s"))
        .def("confirm", &Sealer::confirm, nb::kw_only(), nb::arg("word"), nb::arg("writing"),
             nb::arg("unconfirmed"), nb::arg("sealed"))
        .def("close", close)
        .def("failures", take_failures);
}

} // namespace flashckpt
