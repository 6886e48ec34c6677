# SPDX-License-Identifier: Apache-2.0
# What a wheel says of itself, in its .dist-info: a list of its parts (CycloneDX, PEP 770), and the licences of those
# that are inside libtessera and not ours. No time and no path: the same sources give the same bytes.
if(NOT SKBUILD_METADATA_DIR)
  return()
endif()
set(SBOM_PARTS "")
set(SBOM_DEPENDS "")
if(TESSERA_CUDA)
  # cudart alone is linked in; the driver is looked for when it is first needed.
  set(SBOM_PARTS ",
    {
      \"type\": \"library\",
      \"bom-ref\": \"cudart\",
      \"name\": \"NVIDIA CUDA Runtime (cudart_static)\",
      \"version\": \"${CUDAToolkit_VERSION}\",
      \"purl\": \"pkg:generic/nvidia-cuda-runtime@${CUDAToolkit_VERSION}\",
      \"licenses\": [{\"license\": {\"name\": \"NVIDIA CUDA Toolkit End User License Agreement\"}}]
    }")
  set(SBOM_DEPENDS ", \"cudart\"")
  find_file(TESSERA_CUDA_LICENCE NAMES EULA.txt License.txt NO_DEFAULT_PATH
            PATHS ${CUDAToolkit_TARGET_DIR} ${CUDAToolkit_TARGET_DIR}/../..)
  if(NOT TESSERA_CUDA_LICENCE)  # of the toolkit as packages of PyPI lay it out
    file(GLOB licences ${CUDAToolkit_BIN_DIR}/../dist-info/nvidia_cuda_runtime-*/licenses/License.txt)
    list(GET licences 0 TESSERA_CUDA_LICENCE)
  endif()
  if(NOT TESSERA_CUDA_LICENCE)
    message(FATAL_ERROR "the licence of cudart was not found: a wheel that holds cudart must hold it too; "
                        "set TESSERA_CUDA_LICENCE to the toolkit's EULA.txt")
  endif()
  install(FILES ${TESSERA_CUDA_LICENCE} DESTINATION ${SKBUILD_METADATA_DIR}/licenses
          RENAME NVIDIA-CUDA-EULA.txt COMPONENT python)
endif()
configure_file(${PROJECT_SOURCE_DIR}/cmake/sbom.cdx.json.in ${PROJECT_BINARY_DIR}/tessera.cdx.json @ONLY)
install(FILES ${PROJECT_BINARY_DIR}/tessera.cdx.json DESTINATION ${SKBUILD_METADATA_DIR}/sboms COMPONENT python)
