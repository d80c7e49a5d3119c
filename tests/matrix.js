// Runs the matrix's dispatches in this page and returns their outputs, one after another, as base64.
// Each case: kernel (an index into kernels), grid, sizes, buffers: by binding, [kind, offset, words] into the data.
async ({ kernels, cases, base }) => {
  const data = new Uint32Array(await (await fetch(`${base}/data.bin`)).arrayBuffer());
  const adapter = await navigator.gpu?.requestAdapter();
  if (!adapter) throw new Error("no WebGPU adapter in this page");
  const wanted = new Set(kernels.flatMap((kernel) => kernel.features));
  const requiredFeatures = [...wanted].filter((name) => adapter.features.has(name));
  const device = await adapter.requestDevice({ requiredFeatures }); // WebGPU's default limits
  const errors = [];
  device.addEventListener("uncapturederror", ({ error }) => errors.push(error.message));
  device.lost.then(({ reason, message }) => errors.push(`the device was lost: ${reason} ${message}`));

  const pipelines = kernels.map((kernel) => {
    if (!kernel.features.every((name) => device.features.has(name))) return null;
    const entries = kernel.bindings.map(([binding, type]) => ({
      binding, visibility: GPUShaderStage.COMPUTE, buffer: { type },
    }));
    const layout = device.createBindGroupLayout({ entries });
    const module = device.createShaderModule({ label: kernel.name, code: kernel.source });
    const pipeline = device.createComputePipeline({
      layout: device.createPipelineLayout({ bindGroupLayouts: [layout] }),
      compute: { module, entryPoint: kernel.entry_point },
    });
    return { layout, pipeline };
  });

  const outputs = [];
  for (const { kernel, grid, buffers } of cases) {
    if (!pipelines[kernel]) { outputs.push(new Uint32Array(buffers[0][3])); continue; }
    const { layout, pipeline } = pipelines[kernel];
    const made = buffers.map(([binding, kind, offset, words]) => {
      const usage = kind === "uniform" ? GPUBufferUsage.UNIFORM : GPUBufferUsage.STORAGE | GPUBufferUsage.COPY_SRC;
      const buffer = device.createBuffer({ size: words * 4, usage: usage | GPUBufferUsage.COPY_DST });
      device.queue.writeBuffer(buffer, 0, data, offset, words);
      return { binding, buffer };
    });
    const read = device.createBuffer({
      size: buffers[0][3] * 4, usage: GPUBufferUsage.MAP_READ | GPUBufferUsage.COPY_DST,
    });
    const encoder = device.createCommandEncoder();
    const pass = encoder.beginComputePass();
    pass.setPipeline(pipeline);
    pass.setBindGroup(0, device.createBindGroup({
      layout, entries: made.map(({ binding, buffer }) => ({ binding, resource: { buffer } })),
    }));
    pass.dispatchWorkgroups(...grid);
    pass.end();
    encoder.copyBufferToBuffer(made[0].buffer, 0, read, 0, read.size);
    device.queue.submit([encoder.finish()]);
    await read.mapAsync(GPUMapMode.READ);
    outputs.push(new Uint32Array(read.getMappedRange().slice(0)));
    read.destroy();
    made.forEach(({ buffer }) => buffer.destroy());
  }
  if (errors.length) throw new Error(errors.join("\n"));
  const url = await new Promise((resolve) => {
    const reader = new FileReader();
    reader.onload = () => resolve(reader.result);
    reader.readAsDataURL(new Blob(outputs));
  });
  const { vendor, architecture, description } = adapter.info;
  return {
    outputs: url.slice(url.indexOf(",") + 1),
    adapter: description || `${vendor} ${architecture}`,
    missing: [...wanted].filter((name) => !device.features.has(name)),
  };
}
