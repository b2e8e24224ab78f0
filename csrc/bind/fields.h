#pragma once

/// Descriptions that are declared as dataclasses in Python and read here, a line for each field.

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <string>
#include <string_view>
#include <type_traits>

namespace openspec {

/// One attribute of a Python object and how a T takes it.
template <typename T>
struct Field {
  const char* name;
  void (*read)(T& described, const pybind11::handle& value);
};

/// Reads an attribute of a member's own type.
template <auto kMember, typename T>
void read_as(T& described, const pybind11::handle& value) {
  auto& member = described.*kMember;
  member = value.cast<std::remove_reference_t<decltype(member)>>();
}

/// The name of the class of an object of a class written in Python.
inline std::string_view class_of(const pybind11::handle& object) {
  return Py_TYPE(object.ptr())->tp_name;
}

/// Reads all fields of a table.
///
/// Raises TypeError naming the class and the field whose value does not fit.
template <typename T, size_t N>
void read_fields(T& described, const pybind11::handle& from, const Field<T> (&fields)[N]) {
  for (const Field<T>& field : fields) {
    try {
      field.read(described, from.attr(field.name));
    } catch (const pybind11::cast_error&) {
      throw pybind11::type_error(
          std::string(class_of(from)) + "." + field.name +
          " does not fit: " + std::string(pybind11::repr(from.attr(field.name))));
    }
  }
}

/// Specialised for each described type: `kClass`, the name of its Python class, and `kFields`.
template <typename T>
struct Description;

/// For pybind11: an argument of a described type, wherever it stands.
template <typename T>
struct DescriptionCaster {
  PYBIND11_TYPE_CASTER(T, pybind11::detail::const_name("object"));
  bool load(pybind11::handle from, bool) {
    if (class_of(from) != Description<T>::kClass) return false;
    value = T();
    read_fields(value, from, Description<T>::kFields);
    return true;
  }
};

template <typename T>
concept Described = requires { Description<T>::kClass; };

}  // namespace openspec

template <openspec::Described T>
struct pybind11::detail::type_caster<T> : openspec::DescriptionCaster<T> {};
