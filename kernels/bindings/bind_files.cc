#include <pybind11/numpy.h>
#include <pybind11/stl.h>

#include "kernels/bindings/bindings.h"
#include "kernels/bindings/released_gil.h"
#include "kernels/files/row_reader.h"

namespace py = pybind11;

namespace moebius {

using namespace files;

namespace {

using Rows = py::array_t<int64_t, py::array::c_style>;

std::shared_ptr<RowReader> make_reader(std::shared_ptr<ReadThreads> threads,
                                       const std::vector<std::tuple<size_t, py::list>>& tensors, uint64_t kept_bytes) {
  std::vector<StoredRows> stored;
  for (const auto& [row_bytes, parts] : tensors) {
    StoredRows rows{row_bytes, {}};
    for (const auto& part : parts) {
      const auto [path, offset, count] = part.cast<std::tuple<std::string, uint64_t, uint64_t>>();
      rows.parts.push_back({path, offset, count});
    }
    stored.push_back(std::move(rows));
  }
  return std::make_shared<RowReader>(std::move(threads), std::move(stored), kept_bytes);
}

// uint8 [rows, row_bytes] over the memory itself.
py::array owned(std::unique_ptr<uint8_t[]> memory, size_t rows, size_t row_bytes) {
  uint8_t* data = memory.release();
  const py::capsule owner(data, [](void* pointer) { delete[] static_cast<uint8_t*>(pointer); });
  return py::array_t<uint8_t>({rows, row_bytes}, data, owner);
}

// A fetch and what it takes its memory's sizes from.
struct Fetch {
  Fetch(const std::shared_ptr<RowReader>& table, const Rows& rows) : reader(table) {
    const int64_t* numbers = rows.data();
    const auto count = static_cast<size_t>(rows.size());
    const ReleasedGil release;
    fetch = std::make_unique<RowFetch>(table, numbers, count);
  }

  py::tuple wait() {
    if (!fetch) throw std::invalid_argument("a fetch is waited for once");
    {
      const ReleasedGil release;
      fetch->wait();
    }
    py::list tensors;
    for (size_t i = 0; i < reader->num_tensors(); ++i) {
      tensors.append(owned(fetch->take(i), fetch->num_distinct(), reader->row_bytes(i)));
    }
    const auto& places = fetch->places();
    const Rows found(static_cast<py::ssize_t>(places.size()), places.data());
    fetch.reset();
    return py::make_tuple(found, tensors);
  }

  std::shared_ptr<RowReader> reader;
  std::unique_ptr<RowFetch> fetch;
};

}  // namespace

void bind_files(py::module_& m) {
  py::register_exception<ReadError>(m, "ReadError", PyExc_OSError);
  py::class_<ReadThreads, std::shared_ptr<ReadThreads>>(m, "ReadThreads").def(py::init<int>(), py::arg("num_threads"));
  py::class_<RowReader, std::shared_ptr<RowReader>>(m, "RowReader")
      .def(py::init(&make_reader), py::arg("threads"), py::arg("tensors"), py::arg("kept_bytes"))
      .def_property_readonly("num_rows", &RowReader::num_rows)
      .def_property_readonly("is_direct", &RowReader::is_direct)
      .def_property_readonly("counters", [](const RowReader& reader) {
        const ReadCounters found = reader.counters();
        return py::make_tuple(found.read, found.kept);
      });
  py::class_<Fetch>(m, "RowFetch")
      .def(py::init<const std::shared_ptr<RowReader>&, const Rows&>(), py::arg("reader"), py::arg("rows"))
      .def("wait", &Fetch::wait);
}

}  // namespace moebius
