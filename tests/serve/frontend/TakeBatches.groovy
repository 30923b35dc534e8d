import java.util.concurrent.LinkedBlockingDeque
import org.pytorch.serve.archive.model.Manifest
import org.pytorch.serve.archive.model.ModelArchive
import org.pytorch.serve.job.Job
import org.pytorch.serve.util.ConfigManager
import org.pytorch.serve.util.messages.RequestInput
import org.pytorch.serve.util.messages.WorkerCommands
import org.pytorch.serve.wlm.Model
import org.pytorch.serve.wlm.WorkerState

/** A request during which the thread that takes it is kept from its core, for longer than maxBatchDelay. */
class Slow extends Job {
    Slow(String id, WorkerCommands command) { super('model', '1.0', command, new RequestInput(id)) }

    @Override
    String getJobId() {
        Thread.sleep(3)
        return super.getJobId()
    }

    @Override
    boolean isOpen() { return true }

    @Override
    void response(byte[] body, CharSequence type, int status, String phrase, Map<String, String> headers) { }

    @Override
    void sendError(int status, String message) { }
}

def (folder, size) = [args[0], args[1] as int]
def arguments = new ConfigManager.Arguments()
arguments.setModelStore(folder)
ConfigManager.init(arguments)
def manifest = new Manifest()
manifest.setModel(new Manifest.Model(modelName: 'model', modelVersion: '1.0'))
args.drop(2).each { commands ->
    def model = new Model(new ModelArchive(manifest, 'model', new File(folder), false), 100)
    model.setBatchSize(size)
    model.setMaxBatchDelay(1)
    def queue = new ModelQueue(model, model.@jobsDb.get(Model.DEFAULT_DATA_QUEUE))
    model.@jobsDb.put(Model.DEFAULT_DATA_QUEUE, queue)
    def batches = new Batches(model, queue, [:], new LinkedBlockingDeque())
    commands.split(',').eachWithIndex { command, index ->
        queue.add(new Slow("$index", WorkerCommands.valueOf(command)))
    }
    def taken = []
    while (!queue.isEmpty()) {
        taken << batches.getRequest('W-1', WorkerState.WORKER_MODEL_LOADED).getRequestBatch()*.requestId.join(' ')
        batches.@jobs.clear()
    }
    println 'taken: ' + taken.join(', ')
}
System.exit(0)
